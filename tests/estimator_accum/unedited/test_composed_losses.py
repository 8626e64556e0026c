"""Losses that are composed at random: the gradients of the batch at once, or refused.

To compose more of them than the suite does:

    python -m pytest tests/estimator_accum/unedited/test_composed_losses.py \\
        --composed-losses=5000
"""

import collections

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.models.composed_losses import FEATURES as NAMES
from tests.helpers.models.composed_losses import Composed, composed_losses
from tests.helpers.models.examples import BATCH, FEATURES, make_dataset
from tests.helpers.oracles import exactness

v1 = tf.compat.v1
# Gradients that rounding of the inputs moves by more, are no gradients.
_ROUNDING, _LARGEST_NOISE = 1e-13, 1e-6


@pytest.mark.once
@pytest.mark.slow
def test_a_composed_loss_has_the_gradients_of_the_batch_at_once_or_is_refused(request):
    outcomes = collections.Counter()

    @settings(
        max_examples=request.config.getoption("--composed-losses"),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(composed_losses(), st.sampled_from([4, 2, 7]))
    def check(loss, micro_batches):
        outcomes[_outcome(loss, micro_batches)] += 1

    check()
    print(dict(outcomes))
    assert outcomes["exact"] > sum(outcomes.values()) / 2, outcomes


def _outcome(loss: Composed, micro_batches: int) -> str:
    """Returns the outcome of a loss; raises AssertionError if its gradients differ."""
    expected, noise = _gradients(loss)
    if not any(np.any(gradient) for gradient in expected.values()):
        return "no gradient"
    if not noise <= _LARGEST_NOISE:
        return "only rounding"
    try:
        cut = exactness.train(
            exactness.microbatch_model_fn(_model_fn(loss), micro_batches),
            lambda: make_dataset(NAMES),
            updates=1,
        )
    except exactness.Refused:
        return "refused"
    largest = max(np.max(np.abs(gradient)) for gradient in expected.values())
    tolerance = max(exactness.DOUBLE, 10 * noise) * largest + 1e-14
    for name, gradient in expected.items():
        received = cut.start[name] - cut.values[name]
        difference = np.max(np.abs(received - gradient))
        assert difference <= tolerance, f"{name}: {difference:.1e} > {tolerance:.1e}"
    return "exact"


def _model_fn(loss: Composed):
    def model_fn(features, labels, mode):
        value = loss(labels, **features)
        step = v1.train.get_or_create_global_step()
        train_op = v1.train.GradientDescentOptimizer(1.0).minimize(value, step)
        return tf.estimator.EstimatorSpec(mode, loss=value, train_op=train_op)

    return model_fn


def _gradients(loss: Composed) -> tuple[dict[str, np.ndarray], float]:
    """Returns the batch's gradients, and how far rounding of its inputs moves them.

    Returns:
        Gradients by the names of the variables; the largest difference, relative to the
        largest gradient.
    """
    arrays = {name: FEATURES[name][:BATCH] for name in (*NAMES, "y")}
    jitter = np.random.default_rng(1)
    moved = {
        name: array * (1 + _ROUNDING * jitter.normal(size=array.shape))
        if name in ("x", "seq", "y", "w")
        else array
        for name, array in arrays.items()
    }
    with tf.Graph().as_default():
        inputs = {
            name: v1.placeholder(array.dtype, [None, *array.shape[1:]])
            for name, array in arrays.items()
        }
        value = loss(**inputs)
        variables = v1.trainable_variables()
        pairs = zip(variables, tf.gradients(value, variables), strict=True)
        gradients = {
            v.op.name: tf.convert_to_tensor(g) for v, g in pairs if g is not None
        }
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            first, second = (
                session.run(gradients, {inputs[name]: part[name] for name in part})
                for part in (arrays, moved)
            )
    largest = max((np.max(np.abs(gradient)) for gradient in first.values()), default=1)
    noise = [np.max(np.abs(first[name] - second[name])) for name in first]
    return first, max(noise, default=0) / max(largest, 1e-300)
