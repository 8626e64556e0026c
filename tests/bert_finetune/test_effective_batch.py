"""One effective batch, cut in many ways: the same weights, also from one to another."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest
from other_machine import limited
from tiny_bert import copy_at_step, metrics, results, run, variables

from bert_finetune import jobs, modeling
from estimator_accum.batches import AUTO

pytestmark = [pytest.mark.slow, pytest.mark.once]

_UPDATES = 7


@pytest.fixture(scope="module")
def whole(of_16, tmp_path_factory) -> pathlib.Path:
    """Folder of a run of 16 examples at once."""
    folder = tmp_path_factory.mktemp("whole")
    return run(of_16, output_dir=str(folder / "output"), train_batch_size=16)


@pytest.fixture(scope="module")
def auto(of_16, tmp_path_factory) -> pathlib.Path:
    """Folder of a run of as many at once as memory takes, which is 5."""
    folder = tmp_path_factory.mktemp("auto")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling, "encode", limited(modeling.encode, 5))
        return run(
            of_16,
            output_dir=str(folder / "output"),
            train_batch_size=AUTO,
            do_eval=True,
            save_checkpoints_steps=3,
        )


@pytest.fixture
def settings(of_16, tmp_path):
    return dataclasses.replace(of_16, output_dir=str(tmp_path / "output"))


def _assert_close(folder, whole):
    ours, theirs = variables(folder), variables(whole)
    assert ours.keys() == theirs.keys() and len(ours) > 30
    assert ours["update_step"] == theirs["update_step"] == _UPDATES
    for name in theirs.keys() - {"global_step"}:
        np.testing.assert_allclose(ours[name], theirs[name], atol=1e-5, err_msg=name)
    examples = [int(row["examples"]) for row in metrics(folder)]
    assert examples == [16, 32, 48, 64, 80, 96, 100]


def test_weights_do_not_depend_on_how_an_update_is_cut(whole, in_threes, auto):
    for folder in (in_threes, auto):
        _assert_close(folder, whole)
        assert results(folder)["update_step"] == 7
    found = json.loads((auto / "micro_batches.json").read_text())
    assert found == {"micro_batches": 4}  # 16, 8, and then 4 at once
    steps = [variables(folder)["global_step"] for folder in (whole, in_threes, auto)]
    assert steps == [7, 6 * 6 + 2, 7]


@pytest.mark.parametrize(
    ("first", "step", "then"),
    [("auto", 3, AUTO), ("auto", 3, 3), ("in_threes", 18, AUTO)],
)
def test_a_run_goes_on_cut_in_another_way(
    settings, request, whole, monkeypatch, first, step, then
):
    before = request.getfixturevalue(first)
    copy_at_step(before, pathlib.Path(settings.output_dir), step)
    if is_same := (first, then) == ("auto", AUTO):
        monkeypatch.setattr(modeling, "encode", limited(modeling.encode, 5))
    folder = run(settings, train_batch_size=then)
    _assert_close(folder, whole)
    if is_same:
        ours = variables(folder)
        for name, value in variables(before).items():
            np.testing.assert_array_equal(ours[name], value, err_msg=name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train_batch_size": AUTO},
            (
                r"An update that a checkpoint holds half of must go on as it began\. Rec"
                r"eived: .*, whose run has --train_batch_size=3, not auto\. Use the "
                "same, or another"
            ),
        ),
        (
            {"train_batch_size": 3, "effective_batch_size": 20},
            r"has --effective_batch_size=16, not 20\. Use",
        ),
    ],
)
def test_an_update_that_was_begun_does_not_go_on_cut_in_another_way(
    settings, in_threes, changes, message
):
    copy_at_step(in_threes, pathlib.Path(settings.output_dir), 9)
    with pytest.raises(ValueError, match=message):
        run(settings, **changes)


def test_a_folder_of_before_effective_batches_were_written_is_accepted(
    trained, trained_settings, tmp_path
):
    folder = copy_at_step(trained, tmp_path / "output", 5)
    path = folder / "run_settings.json"
    values = json.loads(path.read_text())
    for field in ("effective_batch_size", "replicas"):
        del values[field]
    path.write_text(json.dumps(values))
    jobs.prepare(dataclasses.replace(trained_settings, output_dir=str(folder)))
