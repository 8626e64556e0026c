"""Other ways to accumulate in Keras, on the same model: `(build_loss, K) -> function`.

Each needs a package that nothing else here needs, and is left out if it is missing.
"""

import importlib.metadata
from collections.abc import Callable

import tensorflow as tf


def keras_built_in(build_loss: Callable[[], tf.Tensor], steps: int) -> Callable:
    """Returns a micro-step with Keras 3's `gradient_accumulation_steps`."""
    import keras

    optimizer = keras.optimizers.SGD(
        1e-6, global_clipnorm=1.0, gradient_accumulation_steps=steps
    )
    variables = {}

    def make(getter, name, shape=None, dtype=None, initializer=None, **_):
        if name not in variables:
            with tf.init_scope():
                variables[name] = keras.Variable(
                    initializer(shape, dtype or tf.float32),
                    name=name.replace("/", "_"),
                )
        return variables[name].value

    def micro_step():
        loss = _built(build_loss, make)
        mine = list(variables.values())
        pairs = zip(tf.gradients(loss, [v.value for v in mine]), mine, strict=True)
        pairs = [(g, v) for g, v in pairs if g is not None]
        if not optimizer.built:
            with tf.init_scope():
                optimizer.build([v for _, v in pairs])
        optimizer.apply([g for g, _ in pairs], [v for _, v in pairs])
        return loss

    return tf.function(micro_step, autograph=False)


def gradient_accumulator(build_loss: Callable[[], tf.Tensor], steps: int) -> Callable:
    """Returns a micro-step with andreped/GradientAccumulator around Keras 2's SGD.

    It does not clip: none of its options clips to a global norm once per window.
    """
    from gradient_accumulator import GradientAccumulateOptimizer

    optimizer = GradientAccumulateOptimizer(
        tf.keras.optimizers.legacy.SGD(1e-6), accum_steps=steps
    )
    variables = {}

    def make(getter, name, shape=None, dtype=None, initializer=None, **_):
        if name not in variables:
            with tf.init_scope():
                first = initializer(shape, dtype or tf.float32)
                variables[name] = tf.Variable(first, name=name)
        return variables[name]

    def micro_step():
        loss = _built(build_loss, make)
        mine = list(variables.values())
        pairs = zip(tf.gradients(loss, mine), mine, strict=True)
        pairs = [(tf.convert_to_tensor(g), v) for g, v in pairs if g is not None]
        if not optimizer.weights:
            with tf.init_scope():
                optimizer._create_all_weights([v for _, v in pairs])
        optimizer.apply_gradients(pairs)
        return loss

    return tf.function(micro_step, autograph=False)


def _built(build_loss, make) -> tf.Tensor:
    with tf.compat.v1.variable_scope(
        "model", custom_getter=make, reuse=tf.compat.v1.AUTO_REUSE
    ):
        return build_loss()


KERAS_WAYS = {
    "Keras built-in": keras_built_in,
    "GradientAccumulator": gradient_accumulator,
}


def why_not(way: str) -> str | None:
    """Returns a sentence that says why `way` cannot run here; None if it can."""
    keras = _version("keras")
    if way == "Keras built-in":
        if keras and int(keras.split(".")[0]) >= 3:
            return None
        return (
            "Keras built-in is left out: it needs Keras 3.7 or later, this is "
            f"{keras or 'none'}."
        )
    if _version("gradient-accumulator") is None:
        return (
            "GradientAccumulator is left out: it is not installed "
            "(pip install --no-deps gradient-accumulator)."
        )
    if keras and int(keras.split(".")[0]) >= 3:
        return (
            "GradientAccumulator is left out: it needs Keras 2, which TensorFlow no "
            f"longer uses here; this is {keras}."
        )
    return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
