"""Whole unedited model_fns train in micro-batches as with the batch at once."""

import pytest
import tensorflow as tf

from tests.helpers.models import model_fns
from tests.helpers.models.examples import make_dataset
from tests.helpers.oracles.exactness import assert_exact, assert_exact_or_refused

v1 = tf.compat.v1
pytestmark = pytest.mark.usefixtures("graph_optimizer")


def _input_fn(script):
    return lambda: make_dataset(script.features)


@pytest.mark.parametrize("name", model_fns.MODEL_FNS)
def test_a_model_fn_trains_as_with_the_batch_at_once(name):
    script = model_fns.MODEL_FNS[name]
    assert_exact(script.model_fn, _input_fn(script), tolerance=script.tolerance)


@pytest.mark.parametrize("name", model_fns.WITH_CONTROL_FLOW)
def test_a_model_fn_with_branches_trains_as_with_the_batch_at_once(name, control_flow):
    script = model_fns.WITH_CONTROL_FLOW[name]
    assert_exact(script.model_fn, _input_fn(script))


@pytest.mark.parametrize("name", model_fns.EXACT_OR_REFUSED)
def test_a_model_fn_is_exact_or_refused(name):
    script = model_fns.EXACT_OR_REFUSED[name]
    assert_exact_or_refused(script.model_fn, _input_fn(script))


@pytest.fixture
def reference_variables():
    v1.disable_resource_variables()
    v1.disable_control_flow_v2()
    yield
    v1.enable_control_flow_v2()
    v1.enable_resource_variables()


@pytest.mark.parametrize(
    "name", ["adam", "clipped", "sparse_and_clipped", "averaged_weights", "frozen"]
)
def test_a_model_fn_with_reference_variables(name, reference_variables):
    script = model_fns.MODEL_FNS[name]
    assert_exact(script.model_fn, _input_fn(script))
