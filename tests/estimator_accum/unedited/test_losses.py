"""Losses of unedited model_fns train in micro-batches as with the batch at once."""

import pytest
import tensorflow as tf

from tests.helpers.models import hidden_mixing, losses
from tests.helpers.models.examples import BATCH
from tests.helpers.models.losses import input_fn_of, model_fn_of
from tests.helpers.oracles import exactness
from tests.helpers.oracles.exactness import EQUAL, SINGLE, assert_exact

_MAY_BE_REFUSED = losses.EXACT_OR_REFUSED | hidden_mixing.HIDDEN


@pytest.mark.parametrize("name", losses.LOSSES)
def test_a_loss_is_that_of_the_batch_at_once(name):
    loss = losses.LOSSES[name]
    assert_exact(model_fn_of(loss), input_fn_of(loss))


@pytest.mark.parametrize("name", losses.SINGLE)
def test_a_loss_in_float32_is_that_of_the_batch_at_once(name):
    loss = losses.SINGLE[name]
    assert_exact(model_fn_of(loss), input_fn_of(loss), tolerance=SINGLE)


@pytest.mark.parametrize("name", losses.WITH_CONTROL_FLOW)
def test_a_loss_with_control_flow_is_that_of_the_batch_at_once(name, control_flow):
    loss = losses.WITH_CONTROL_FLOW[name]
    assert_exact(model_fn_of(loss), input_fn_of(loss))


@pytest.mark.parametrize("name", _MAY_BE_REFUSED)
def test_a_loss_is_exact_or_refused(name):
    loss = _MAY_BE_REFUSED[name]
    input_fn = input_fn_of(loss, drop_remainder=name == "static_batch_size")
    tolerance = SINGLE if name.startswith("contrast") else None
    exactness.assert_exact_or_refused(model_fn_of(loss), input_fn, tolerance=tolerance)


@pytest.mark.parametrize("name", hidden_mixing.WITH_CONTROL_FLOW)
def test_a_loop_that_hides_how_it_mixes_is_exact_or_refused(name, control_flow):
    loss = hidden_mixing.WITH_CONTROL_FLOW[name]
    exactness.assert_exact_or_refused(model_fn_of(loss), input_fn_of(loss))


@pytest.mark.parametrize(
    "name", ["mean", "sum", "boolean_mask", "one_per_example", "mean_and_l2"]
)
def test_one_micro_batch_is_the_batch_bit_for_bit(name):
    loss = losses.LOSSES[name]
    assert_exact(model_fn_of(loss), input_fn_of(loss), micro_batches=1, tolerance=EQUAL)


@pytest.mark.parametrize(
    "name",
    ["mean", "rmse", "gather_of_where", "in_batch_negatives", "rolled"]
    + ["one_per_example"],
)
def test_micro_batches_of_one_example(name):
    loss = losses.LOSSES[name]
    input_fn = input_fn_of(loss, drop_remainder=True)
    assert_exact(model_fn_of(loss), input_fn, micro_batches=BATCH)


@pytest.fixture
def dimensions():
    """Makes sizes TensorFlow 1's `Dimension`s, as under --v1."""
    tf.compat.v1.disable_v2_tensorshape()
    yield
    tf.compat.v1.enable_v2_tensorshape()


# Together they have most types of operations of the table.
_OF_MOST_TYPES = ["sum_of_sequence_means", "matmul_with_ones", "dynamic_partition"]
_OF_MOST_TYPES += ["ragged_rows", "sparse_product", "two_views"]
_OF_MOST_TYPES += ["ranking_in_groups", "balanced_experts", "nuclear_norm"]
_OF_MOST_TYPES += ["median", "mixed_up", "halves", "detection"]
_OF_MOST_TYPES += ["penalty_of_batchs_rows", "joined", "keras_auto"]
_OF_MOST_TYPES += ["straight_through", "virtual_adversarial"]


@pytest.mark.once
@pytest.mark.usefixtures("dimensions")
@pytest.mark.parametrize("name", _OF_MOST_TYPES)
def test_a_loss_of_dimensions_is_that_of_the_batch_at_once(name):
    loss = losses.LOSSES[name]
    assert_exact(model_fn_of(loss), input_fn_of(loss))
