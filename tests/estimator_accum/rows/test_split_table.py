"""The page of all functions agrees with the analysis of rows."""

import pytest
import tensorflow as tf

from estimator_accum.rows.analysis import Analysis
from tests.helpers.oracles import split_table


@pytest.mark.parametrize(
    "places", [split_table.places_of_functions, split_table.places_of_layers]
)
def test_every_name_has_its_place_on_the_page(places):
    page = split_table.read(split_table.PAGE.read_text())
    for section, answers in places().items():
        of_page = {name: page[section].get(name) for name in answers}
        assert of_page == answers, f"type python -m {split_table.__name__}"


def test_an_operation_without_a_rule_is_not_said_to_combine_examples():
    with tf.Graph().as_default():
        ids = tf.compat.v1.placeholder(tf.int32, [None])
        rest, _ = tf.compat.v1.setdiff1d(ids, [0])
        place = split_table.place_of("new", [rest], Analysis([ids]))
    assert place == split_table.Place("no rule", "`ListDiff` has no rule")
