"""Networks of unedited model_fns train in micro-batches as with the batch at once."""

import numpy as np
import pytest

from tests.helpers.models import networks
from tests.helpers.models.examples import BATCH, make_dataset
from tests.helpers.models.networks import features_of_network, model_fn_of_network
from tests.helpers.oracles import exactness
from tests.helpers.oracles.exactness import (
    SINGLE,
    assert_exact,
    assert_exact_or_refused,
)


def _input_fn(network, **options):
    return lambda: make_dataset(features_of_network(network), **options)


@pytest.mark.parametrize("name", networks.NETWORKS)
def test_a_network_trains_as_with_the_batch_at_once(name):
    network = networks.NETWORKS[name]
    assert_exact(model_fn_of_network(network), _input_fn(network))


@pytest.mark.parametrize("name", networks.WITH_CONTROL_FLOW)
def test_a_network_with_loops_trains_as_with_the_batch_at_once(name, control_flow):
    network = networks.WITH_CONTROL_FLOW[name]
    assert_exact(model_fn_of_network(network), _input_fn(network))


@pytest.mark.parametrize("name", networks.SINGLE)
def test_a_network_in_float32_trains_as_with_the_batch_at_once(name):
    network = networks.SINGLE[name]
    assert_exact(model_fn_of_network(network), _input_fn(network), tolerance=SINGLE)


@pytest.mark.parametrize("name", networks.HALF)
def test_a_network_in_half_precision_trains_as_with_the_batch_at_once(name):
    network, tolerance = networks.HALF[name]
    model_fn = model_fn_of_network(network)
    assert_exact(model_fn, _input_fn(network), tolerance=tolerance)


@pytest.mark.parametrize("name", networks.EXACT_OR_REFUSED)
def test_a_network_of_several_examples_is_exact_or_refused(name):
    network = networks.EXACT_OR_REFUSED[name]
    tolerance = SINGLE if name == "batch_norm_of_tensorflow_1" else None
    assert_exact_or_refused(
        model_fn_of_network(network), _input_fn(network), tolerance=tolerance
    )


@pytest.mark.parametrize("name", ["squeezed", "last_word", "learned_queries", "bert"])
def test_micro_batches_of_one_example(name):
    network = networks.NETWORKS[name]
    input_fn = _input_fn(network, drop_remainder=True)
    assert_exact(model_fn_of_network(network), input_fn, micro_batches=BATCH)


def test_dropout_trains():
    network = networks.dropped_out
    model_fn = exactness.microbatch_model_fn(model_fn_of_network(network), 4)
    trained = exactness.train(model_fn, _input_fn(network), updates=8)
    changes = exactness.assert_trains(trained).changes()
    assert all(changes[name] > 1e-6 for name in trained.trainable)
    np.testing.assert_array_less(trained.losses[-1], trained.losses[1])
