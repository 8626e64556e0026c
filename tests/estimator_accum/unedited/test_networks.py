"""Networks of unedited model_fns train in micro-batches as with the batch at once."""

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.models import networks
from tests.helpers.models.examples import BATCH
from tests.helpers.models.losses import input_fn_of, model_fn_of
from tests.helpers.oracles import exactness
from tests.helpers.oracles.exactness import SINGLE, assert_exact
from tests.helpers.tables import rows

v1 = tf.compat.v1
# A few roundings of a number of the type.
_ROUNDINGS = {"bfloat16": 2e-2, "float16": 5e-3}

# The other rows run all lines and branches of the library that these do.
_DAILY = {
    *("batch_norm_of_inference", "best_experts", "capsules", "conv_of_tensorflow_1"),
    *("flattened_by_shape", "graph_convolution", "group_norm", "keras_embedding"),
    *("last_word_of_flat_words", "learned_queries", "repeated_state", "separable"),
    *("split_heads", "squeezed", "time_major"),
}
_DAILY_LOOPS = {"keras_lstm", "loop_with_an_array"}


@pytest.mark.parametrize("name", rows(networks.NETWORKS, _DAILY))
def test_a_network_trains_as_with_the_batch_at_once(name):
    network = networks.NETWORKS[name]
    share = assert_exact(model_fn_of(network), input_fn_of(network))
    assert share < 5


@pytest.mark.parametrize("name", rows(networks.WITH_CONTROL_FLOW, _DAILY_LOOPS))
def test_a_network_with_loops_trains_as_with_the_batch_at_once(name, control_flow):
    network = networks.WITH_CONTROL_FLOW[name]
    share = assert_exact(model_fn_of(network), input_fn_of(network))
    if v1.control_flow_v2_enabled():
        assert share < 5


@pytest.mark.parametrize("name", [*networks.SINGLE, *networks.HALF])
def test_a_network_in_less_than_double_precision_trains_as_with_the_batch_at_once(name):
    network = (networks.SINGLE | networks.HALF)[name]
    tolerance = _ROUNDINGS.get(name, SINGLE)
    input_fn = input_fn_of(network)
    share = assert_exact(model_fn_of(network), input_fn, tolerance=tolerance)
    assert share < 5


@pytest.mark.parametrize("name", networks.EXACT_OR_REFUSED)
def test_a_network_of_several_examples_is_exact_or_refused(name):
    network = networks.EXACT_OR_REFUSED[name]
    tolerance = SINGLE if name == "batch_norm_of_tensorflow_1" else None
    exactness.assert_exact_or_refused(
        model_fn_of(network), input_fn_of(network), tolerance=tolerance
    )


@pytest.mark.parametrize("name", ["squeezed", "last_word", "learned_queries", "bert"])
def test_micro_batches_of_one_example(name):
    network = networks.NETWORKS[name]
    input_fn = input_fn_of(network, drop_remainder=True)
    assert_exact(model_fn_of(network), input_fn, micro_batches=BATCH)


def test_dropout_trains():
    """Random numbers are others in micro-batches: only that it trains can be asked."""

    def loss(x, y, w):
        weights = [networks.variable(n, 4, 3) for n in ("shown", "hidden")]
        dropped = tf.nn.dropout(tf.tanh(x @ weights[1]), rate=0.5, seed=3)
        errors = (x @ weights[0] + dropped - y) ** 2
        return tf.reduce_sum(errors * w[:, None]) / tf.reduce_sum(w)

    model_fn = exactness.microbatch_model_fn(model_fn_of(loss), 4)
    trained = exactness.train(model_fn, input_fn_of(loss), updates=8)
    changes = exactness.assert_trains(trained).changes()
    assert all(changes[name] > 1e-6 for name in trained.trainable)
    np.testing.assert_array_less(trained.losses[-1], trained.losses[1])
