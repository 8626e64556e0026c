"""A batch in micro-batches gives the weights of the batch."""

import pytest
import tensorflow as tf

from tests.helpers.models.microbatch_runs import (
    by_optimizer,
    by_train_op,
    difference,
    embedding_layer,
    input_fn_of,
    make_model_fn,
    plain,
    train,
    train_in_micro_batches,
)

pytestmark = pytest.mark.usefixtures("graph_optimizer")
v1 = tf.compat.v1
# 5 batches, the last of which is short.
_INPUT = input_fn_of(examples=4 * 64 + 37, batch_size=64)


@pytest.mark.parametrize(
    ("make_train_op", "optimizer"), [(by_train_op, "adam"), (by_optimizer, "momentum")]
)
def test_any_number_of_micro_batches_gives_the_batchs_weights_and_one_to_the_bit(
    make_train_op, optimizer, tmp_path
):
    theirs = train(make_model_fn(plain(optimizer)), tmp_path / "plain", _INPUT)
    model_fn = make_model_fn(make_train_op(optimizer))
    several = [(3, 5e-7), (64, 5e-7)] if optimizer == "momentum" else []
    for count, tolerance in [(1, 0), ("auto", 0), *several]:
        ours = train_in_micro_batches(model_fn, tmp_path / str(count), _INPUT, count)
        assert theirs["global_step"] == 5
        assert ours["update_step"] == ours["global_step"] == 5
        assert difference(ours, theirs) <= tolerance


@pytest.mark.parametrize(
    ("optimizer", "tolerance"),
    [
        ("adam", 0),
        # The plain optimizer adds a row's gradients to the row one by one.
        ("sgd", 5e-6),
    ],
)
def test_sparse_gradients_are_the_batchs(optimizer, tolerance, tmp_path):
    # Stops before the end of the data, where plain Adam decays its slots once more.
    options = {"input_fn": _INPUT, "max_steps": 4}
    model_fn = make_model_fn(plain(optimizer), embedding_layer)
    theirs = train(model_fn, tmp_path / "plain", **options)
    model_fn = make_model_fn(by_train_op(optimizer), embedding_layer)
    for count in (1, 8):
        folder = tmp_path / str(count)
        ours = train_in_micro_batches(model_fn, folder, micro_batches=count, **options)
        assert difference(ours, theirs) <= max(tolerance, 1e-6 * (count > 1))
