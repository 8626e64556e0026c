"""HParams: kinds, texts, refusals."""

import copy
import json

import pytest

from estimator_accum.compat.v1._hparams import HParams

pytestmark = pytest.mark.once


@pytest.fixture
def hparams():
    return HParams(rate=0.1, units=[8, 4], name="x", deep=True, count=3, unknown=None)


def test_values_are_attributes_and_one_dictionary(hparams):
    assert (hparams.rate, hparams.units, hparams.unknown) == (0.1, [8, 4], None)
    assert hparams.values() == {
        "rate": 0.1,
        "units": [8, 4],
        "name": "x",
        "deep": True,
        "count": 3,
        "unknown": None,
    }
    hparams.count = 5
    assert hparams.values()["count"] == hparams.get("count") == 5
    assert hparams.get("no_such", 7) == 7
    assert "rate" in hparams and "no_such" not in hparams
    assert str(HParams(b=1, a="c")) == "[('a', 'c'), ('b', 1)]"
    assert repr(HParams(b=1)) == "HParams([('b', 1)])"


def test_copies_are_independent(hparams):
    other = copy.deepcopy(hparams)
    other.add_hparam("new", 1)
    other.units.append(2)
    assert "new" not in hparams
    assert hparams.units == [8, 4]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rate=1e-3", {"rate": 1e-3}),
        ("rate=2, units=[16, 2] , name = a/b.c", {"rate": 2.0, "units": [16, 2]}),
        ("units=[5]", {"units": [5]}),
        ("units=[]", {"units": []}),
        ("deep=false,count=-7", {"deep": False, "count": -7}),
        ("deep=0", {"deep": False}),
        ("name=", {"name": ""}),
        ("", {}),
    ],
)
def test_parsed_text_replaces_values_of_the_same_kind(hparams, text, expected):
    assert hparams.parse(text) is hparams
    contents = hparams.values()
    assert {name: contents[name] for name in expected} == expected
    for name, value in expected.items():
        assert type(contents[name]) is type(value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("no_such=1", "no_such is not one of rate, units,"),
        ("count=1.5", "count is of kind int"),
        ("deep=maybe", "deep is of kind bool"),
        ("count=1,count=2", "count is there twice"),
        ("units=[1,2", r"`units=\[1,2` is no assignment"),
        ("units[1]=3", r"`units\[1\]=3` is no assignment"),
        ("rate 2", "`rate 2` is no assignment"),
        ("unknown=1", "unknown is of kind NoneType"),
    ],
)
def test_text_that_cannot_be_parsed_is_refused_and_changes_nothing(
    hparams, text, reason
):
    before = hparams.values()
    with pytest.raises(ValueError, match=f"known names .* Received: .*where {reason}"):
        hparams.parse(f"rate=5,{text}")
    assert hparams.values() == before


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("units", 3, r"`units` must be a list\. Received: units = 3"),
        ("count", [3], r"`count` must be a single value\. Received: count = \[3\]"),
        ("count", 1.5, "of kind int. Received: 1.5"),
        ("count", True, "of kind int. Received: True"),
        ("deep", 1, "of kind bool. Received: 1"),
        ("name", 1, "of kind str. Received: 1"),
        ("rate", "1", "of kind float. Received: '1'"),
    ],
)
def test_value_of_another_kind_is_refused(hparams, name, value, sentence):
    with pytest.raises(ValueError, match=sentence):
        hparams.set_hparam(name, value)


def test_value_of_a_dictionary_or_of_json_keeps_the_kind(hparams):
    hparams.override_from_dict({"rate": 2, "unknown": "any"})
    assert type(hparams.rate) is float
    assert hparams.unknown == "any"
    hparams.parse_json('{"units": [1], "deep": false}')
    assert (hparams.units, hparams.deep) == ([1], False)
    with pytest.raises(KeyError):
        hparams.set_hparam("no_such", 1)


def test_name_that_is_taken_and_empty_list_are_refused(hparams):
    for name in ("rate", "parse"):
        with pytest.raises(ValueError, match=f"must be new. Received: {name}"):
            hparams.add_hparam(name, 1)
    with pytest.raises(ValueError, match=r"must have an element.*new = \[\]"):
        hparams.add_hparam("new", [])
    hparams.del_hparam("rate")
    hparams.del_hparam("no_such")
    assert "rate" not in hparams and not hasattr(hparams, "rate")


def test_json_has_no_callables():
    hparams = HParams(rate=0.5, act=len, many=[len, 1], nested={"f": len, "x": 1})
    text = hparams.to_json(sort_keys=True)
    assert text == '{"many": [1], "nested": {"x": 1}, "rate": 0.5}'
    assert json.loads(hparams.to_json(indent=1)) == json.loads(text)
