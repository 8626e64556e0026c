"""Chains of operations in a gradient that somebody wrote: accepted ones are sums."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum.rows.analysis import Analysis
from estimator_accum.rows.own_gradients import (
    changed_by_own_gradients,
    check_own_gradients,
    results_with_own_gradients,
)
from estimator_accum.rows.own_sums import DERIVATIVES

v1 = tf.compat.v1
_N = 5
# Functions of the gradient g of a weight w, both [5, 5].
_LINEAR = {
    "negative": lambda g, w: -g,
    "part": lambda g, w: 0.25 * g,
    "quotient": lambda g, w: g / (1.5 + w),
    "transpose": lambda g, w: tf.transpose(g),
    "product": lambda g, w: w @ g,
    "of_signs": lambda g, w: g * tf.sign(w),
    "sum": lambda g, w: tf.reduce_sum(g, 0, keepdims=True) + tf.zeros([_N, _N]),
    "centered": lambda g, w: g - tf.reduce_mean(g),
    "twice": lambda g, w: tf.add_n([g, g, g]),
    "halves": lambda g, w: tf.concat([g[2:], -g[:2]], 0),
    "split": lambda g, w: tf.concat(tf.split(g, [2, 3], 1)[::-1], 1),
    "masked": lambda g, w: tf.where(w > 0, g, tf.zeros_like(g)),
    "chosen": lambda g, w: tf.where(w > 0, g, 2 * g),
    "reshaped": lambda g, w: tf.reshape(tf.roll(tf.reshape(g, [-1]), 3, 0), [_N, _N]),
    "padded": lambda g, w: tf.pad(g, [[1, 0], [0, 0]])[:-1],
    "summed": lambda g, w: tf.cumsum(g, 1),
    "gathered": lambda g, w: tf.gather(g, [4, 0, 0, 1, 2]),
    "diagonal": lambda g, w: tf.linalg.band_part(g, 1, 1),
    "einsum": lambda g, w: tf.einsum("ij,jk->ki", g, w),
    "unstacked": lambda g, w: tf.stack(tf.unstack(g)[::-1], 1),
    "segments": lambda g, w: tf.math.unsorted_segment_sum(g, [0, 0, 1, 2, 4], _N),
}
_OTHERS = {
    "added": lambda g, w: g + 0.1,
    "decayed": lambda g, w: g + 0.1 * w,
    "constant": lambda g, w: tf.ones_like(g),
    "weight": lambda g, w: tf.identity(w),
    "clipped": lambda g, w: tf.clip_by_value(g, -0.1, 0.1),
    "normalized": lambda g, w: g / tf.norm(g),
    "sign": lambda g, w: tf.sign(g),
    "square": lambda g, w: g * g,
    "of_itself": lambda g, w: g @ tf.transpose(g),
    "absolute": lambda g, w: tf.abs(g),
    "softmax": lambda g, w: tf.nn.softmax(g),
    "sorted": lambda g, w: tf.sort(g),
    "largest": lambda g, w: tf.where(g > 0, g, tf.zeros_like(g)),
    "padded_by_1": lambda g, w: tf.pad(g, [[1, 0], [0, 0]], constant_values=1.0)[:-1],
    "rounded": lambda g, w: tf.cast(tf.cast(10 * g, tf.int32), tf.float32),
    "truth": lambda g, w: tf.cast(tf.cast(g, tf.bool), tf.float32),
    "reciprocal": lambda g, w: w / (10 + g),
    "joined": lambda g, w: tf.concat([g[:2], w[2:]], 0),
    "greatest": lambda g, w: g - tf.reduce_max(g),
}
_ALL = _LINEAR | _OTHERS


def _is_accepted(chain: tuple[str, ...]) -> bool:
    """Returns whether a chain has a proof, after a comparison of numbers if it has one."""
    random = np.random.default_rng(0)
    x, dy = random.normal(size=[2, 9, _N]).astype("float32")
    with tf.Graph().as_default(), v1.Session() as session:
        rows, arriving = (v1.placeholder(tf.float32, [None, _N]) for _ in range(2))
        start = random.normal(size=[_N, _N]).astype("float32")
        weight = v1.get_variable("w", initializer=start, use_resource=True)

        @tf.custom_gradient
        def product(x, w):
            def gradient(dy):
                changed = tf.matmul(x, dy, transpose_a=True)
                for name in chain:
                    changed = _ALL[name](changed, w)
                return tf.matmul(dy, w, transpose_b=True), changed

            return tf.matmul(x, w), gradient

        output = product(rows, tf.convert_to_tensor(weight))
        analysis = Analysis([rows])
        analysis.analyze([output])
        results = results_with_own_gradients(analysis, [output], [weight.handle])
        changed = changed_by_own_gradients([output], [weight.handle])
        gradients = tf.gradients(
            [output], [weight, *results, *changed], [arriving], name=DERIVATIVES
        )
        end = 1 + len(results)
        pairs = zip([output, *results], [arriving, *gradients[1:end]], strict=True)
        try:
            check_own_gradients(
                analysis,
                [*pairs],
                gradients[:1],
                "stop",
                [*zip(changed, gradients[end:], strict=True)],
            )
        except ValueError as error:
            assert "must be sums over the examples" in str(error)
            return False
        session.run(v1.global_variables_initializer())

        def derived(part: slice) -> np.ndarray:
            return session.run(gradients[0], {rows: x[part], arriving: dy[part]})

        parts = derived(slice(4)) + derived(slice(4, 8)) + derived(slice(8, None))
        np.testing.assert_allclose(parts, derived(slice(None)), rtol=1e-4, atol=1e-4)
        return True


@pytest.mark.parametrize("name", _LINEAR)
def test_a_linear_function_of_a_sum_is_accepted(name):
    assert _is_accepted((name,))


@pytest.mark.parametrize("name", _OTHERS)
def test_another_function_is_refused(name):
    assert not _is_accepted((name,))


def test_chains_are_accepted_if_all_their_functions_are_linear():
    random = np.random.default_rng(1)
    chains = [tuple(random.choice([*_ALL], 3)) for _ in range(40)]
    chains += itertools.islice(itertools.permutations(_LINEAR, 2), 0, None, 30)
    accepted = {chain for chain in chains if _is_accepted(chain)}
    assert accepted == {chain for chain in chains if {*chain} <= {*_LINEAR}}
