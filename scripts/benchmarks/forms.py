"""The program that measures other forms of an update's operations beside today's.

    python -m scripts.benchmarks.forms '{"size": [6, 384, 12], "sentences": 32,
        "tokens": 360, "longest": 23}'

It serves seconds of a call under the names "operation: form", at the shapes that
micro-batches of that many sentences and tokens have.
"""

import functools
import json
import os
import statistics
import sys
import time
import types

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow's import

import tensorflow as tf

from bert_finetune import layers
from bert_finetune.active_rows import read
from bert_finetune.optimization import BETA_1, BETA_2, AdamWeightDecayOptimizer
from scripts.benchmarks.base import serve
from scripts.benchmarks.models import Size

v1 = tf.compat.v1

_DROPOUT, _CALLS = 0.1, 20


def main() -> None:
    """Reads the sizes from the command line, and serves."""
    spec = json.loads(sys.argv[1])
    v1.disable_eager_execution()
    v1.train.get_or_create_global_step()
    size, tokens, longest = Size(*spec["size"]), spec["tokens"], spec["longest"]
    hidden, wide = size.hidden, 4 * size.hidden
    scores = spec["sentences"], size.heads, longest, longest
    operations = {
        f"dense gradients, {i} to {o}": _dense_gradients(tokens, i, o)
        for i, o in ((hidden, hidden), (hidden, wide), (wide, hidden))
    }
    operations["dropout of attention"] = _dropouts(size.layers, *scores)
    operations["dropout of hidden"] = _dropouts(size.layers, tokens, hidden)
    operations["query, key, value"] = _projections(tokens, hidden)
    operations["decay and Adam"] = _adams(size)
    session = v1.Session()
    session.run(v1.global_variables_initializer())
    answers = {}
    for operation, forms in operations.items():
        for form, results in forms.items():
            call = session.make_callable(_all(results))
            call()  # compiles and allocates
            answers[f"{operation}: {form}"] = functools.partial(_secs, call)
    serve({}, **answers)


def _secs(call) -> float:
    times = []
    for _ in range(_CALLS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _all(results):
    """Returns one fetch, for which TensorFlow can drop none of the results."""
    if isinstance(results, tf.Operation):
        return results
    return tf.add_n([tf.reshape(result, [-1])[0] for result in results])


def _random(*shape: int) -> tf.Tensor:
    return v1.Variable(tf.random.normal(shape)).read_value()


def _dense_gradients(tokens: int, inputs: int, units: int) -> dict:
    x, dy = _random(tokens, inputs), _random(tokens, units)
    kernel, ones = _random(inputs, units), tf.ones([tokens, 1])

    def gradients(x):
        dense = types.SimpleNamespace(inputs=[None, x, kernel, None])
        return layers._dense_gradient(dense, dy)[1:]

    dx, d_kernel, d_bias = gradients(x)
    dx_of_joined, joined, _ = gradients(tf.concat([x, ones], 1))
    return {
        "today": [dx, d_kernel, d_bias],
        "product with ones": [dx, d_kernel, tf.matmul(ones, dy, transpose_a=True)],
        "column of ones": [dx_of_joined, joined[:-1], joined[-1]],
    }


def _dropouts(number: int, *shape: int) -> dict:
    """Returns forms of some dropouts one after the other."""
    x, dy = _random(*shape), _random(*shape)
    y, product, dx, factors = x, x, dy, []
    for i in range(number):
        with tf.name_scope(f"layer_{i}"):  # each draws its own numbers
            y = layers.dropout(y, _DROPOUT)
        factors.append(tf.where(y.op.inputs[0], 1 / (1 - _DROPOUT), 0.0))
        product *= factors[-1]
    for factor in reversed(factors):
        dx *= factor
    return {"today": [y, *tf.gradients(y, x, dy)], "one factor": [product, dx]}


def _projections(tokens: int, hidden: int) -> dict:
    x, *dys = (_random(tokens, hidden) for _ in range(4))
    options = {"initializer_range": 0.02, "is_training": True}
    ys = [layers.dense(x, hidden, name, **options) for name in "qkv"]
    *_, kernels, biases = zip(*(y.op.inputs for y in ys), strict=True)
    kernel, bias = tf.concat(kernels, 1), tf.concat(biases, 0)
    joined = tf.nn.bias_add(tf.matmul(x, kernel), bias)
    joined = layers._with_gradient(layers._DENSE, joined, x, kernel, bias)
    batched = tf.matmul(x, tf.stack(kernels)) + tf.stack(biases)[:, tf.newaxis]
    forms = {
        "today": ys,
        "one product": tf.split(joined, 3, 1),
        "batch of products": tf.unstack(batched),
    }
    sources = [x, *kernels, *biases]
    return {
        form: [*its_ys, *tf.gradients(its_ys, sources, dys)]
        for form, its_ys in forms.items()
    }


class _OneFactor(AdamWeightDecayOptimizer):
    def _decayed(self, variable, share, grad):
        value = read(variable.handle, grad.dtype) * (1.0 - share)
        return [tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)]


class _OnePass(AdamWeightDecayOptimizer):
    def _resource_apply_dense(self, grad, handle):
        scalars = self._scalars_for(handle, grad.dtype)
        rates = [scalars[name] for name in ("lr", "epsilon", "decay")]
        return _adam(*self._resources(handle), grad, *rates).op


@tf.function(jit_compile=True)
def _adam(*arguments: tf.Tensor) -> tf.Tensor:
    *resources, g, rate, epsilon, decay = arguments
    x, m, v = (read(resource, g.dtype) for resource in resources)
    m, v = m + (1 - BETA_1) * (g - m), v + (1 - BETA_2) * (g * g - v)
    x -= decay * x + rate * m / (tf.sqrt(v) + epsilon)
    for resource, value in zip(resources, (x, m, v), strict=True):
        tf.raw_ops.AssignVariableOp(resource=resource, value=value)
    return tf.zeros([])


def _adams(size: Size) -> dict:
    hidden, wide = size.hidden, 4 * size.hidden
    layer = [*4 * [(hidden, hidden)], (hidden, wide), (wide, hidden)]
    gradients = [_random(*shape) for shape in size.layers * layer]
    optimizers = {
        "today": AdamWeightDecayOptimizer,
        "decay as a factor": _OneFactor,
        "one pass by XLA": _OnePass,
    }
    return {
        form: optimizer(1e-5).apply_gradients(
            [(g, v1.Variable(tf.random.normal(g.shape))) for g in gradients]
        )
        for form, optimizer in optimizers.items()
    }


if __name__ == "__main__":
    main()
