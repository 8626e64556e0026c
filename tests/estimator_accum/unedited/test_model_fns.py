"""Whole unedited model_fns train in micro-batches as with the batch at once."""

import pytest
import tensorflow as tf

from tests.helpers.models import model_fns
from tests.helpers.models.losses import input_fn_of
from tests.helpers.oracles import exactness
from tests.helpers.tables import rows

v1 = tf.compat.v1

# test_golden_graphs.py compares the graphs of these, node by node; the other rows run all
# lines and branches of the library that these do.
_DAILY = {
    *("adagrad", "adversaries", "averaged_weights", "clipped", "codebook", "counted"),
    *("each_clipped", "frozen", "lookups_clipped", "metrics", "options_of_minimize"),
    *("partitioned", "regression_head", "scaled_loss", "summarized"),
    *("two_gradients_of_a_tape", "two_rates", "without_conflict"),
}


def _check(assert_of, case):
    script, tolerance = case
    assert_of(model_fns.model_fn_of(script), input_fn_of(script), tolerance=tolerance)


@pytest.mark.parametrize("name", rows(model_fns.EXACT, _DAILY))
def test_a_model_fn_trains_as_with_the_batch_at_once(name):
    _check(exactness.assert_exact, model_fns.EXACT[name])


@pytest.mark.parametrize("name", model_fns.WITH_CONTROL_FLOW)
def test_a_model_fn_with_branches_trains_as_with_the_batch_at_once(name, control_flow):
    _check(exactness.assert_exact, model_fns.WITH_CONTROL_FLOW[name])


@pytest.mark.parametrize("name", model_fns.EXACT_OR_REFUSED)
def test_a_model_fn_is_exact_or_refused(name):
    _check(exactness.assert_exact_or_refused, model_fns.EXACT_OR_REFUSED[name])


@pytest.fixture
def reference_variables():
    v1.disable_resource_variables()
    v1.disable_control_flow_v2()
    yield
    v1.enable_control_flow_v2()
    v1.enable_resource_variables()


@pytest.mark.parametrize(
    "name",
    [
        *("adam", "clipped", "sparse_and_clipped", "averaged_weights", "frozen"),
        "lookups_clipped",
    ],
)
def test_a_model_fn_with_reference_variables(name, reference_variables):
    _check(exactness.assert_exact, model_fns.EXACT[name])
