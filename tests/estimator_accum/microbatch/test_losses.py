"""Unedited model_fns train in micro-batches as with the batch at once, or are refused."""

import pytest
import tensorflow as tf

from tests.helpers import losses
from tests.helpers.exactness import assert_exact, assert_exact_or_refused
from tests.helpers.examples import make_dataset
from tests.helpers.losses import features_of, model_fn_of

pytestmark = pytest.mark.usefixtures("graph_optimizer")
v1 = tf.compat.v1


@pytest.mark.parametrize("name", losses.LOSSES)
def test_a_loss(name):
    loss = losses.LOSSES[name]
    assert_exact(model_fn_of(loss), lambda: make_dataset(features_of(loss)))


@pytest.mark.parametrize("name", losses.SINGLE)
def test_a_loss_in_float32(name):
    loss = losses.SINGLE[name]
    assert_exact(
        model_fn_of(loss), lambda: make_dataset(features_of(loss)), tolerance=2e-5
    )


@pytest.mark.parametrize("name", losses.WITH_CONTROL_FLOW)
def test_a_loss_with_control_flow(name, control_flow):
    loss = losses.WITH_CONTROL_FLOW[name]
    assert_exact(model_fn_of(loss), lambda: make_dataset(features_of(loss)))


@pytest.mark.parametrize("name", losses.EXACT_OR_REFUSED)
def test_a_loss_that_may_be_refused(name):
    loss = losses.EXACT_OR_REFUSED[name]
    assert_exact_or_refused(
        model_fn_of(loss),
        lambda: make_dataset(features_of(loss), name == "static_batch_size"),
    )
