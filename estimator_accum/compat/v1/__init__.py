"""TensorFlow 1's names for scripts that were never migrated.

    tf = enable_v1()

From then on, modules of the user that are imported say `import tensorflow as tf` and
get `tensorflow.compat.v1`; installed packages get the TensorFlow that they expect. A
script that must not be edited runs with

    python -m estimator_accum.compat --v1 legacy_script.py --its --flags
"""

import types

from estimator_accum.compat import enable_estimator


def enable_v1() -> types.ModuleType:
    """Makes the user's modules run as TensorFlow 1 code; returns `tf.compat.v1`.

    `rule: tensorflow -> tensorflow.compat.v1 in modules outside of site-packages`

    Enables `tf.estimator`, turns TensorFlow 2's behavior off for the whole process,
    variables excepted, which stay resources: their reads and writes have an order.
    They get TensorFlow 1's `initialized_value()`, and one that is named global_step is
    found as the global step. Adds `tf.contrib` (see _contrib.py),
    `tf.flags.FlagsError`, and names that Python and NumPy removed (see _removed.py).
    Modules that were imported before do not change. A second call does nothing.

    Returns:
        The module `tensorflow.compat.v1`.

    Raises:
        ImportError: As `enable_estimator` does.
    """
    tf = enable_estimator()
    v1 = tf.compat.v1
    if "contrib" in vars(v1):
        return v1
    from estimator_accum.compat.v1 import _contrib, _global_step, _imports, _removed

    logger = tf.get_logger()
    level = logger.level
    logger.setLevel("ERROR")  # users cannot do anything about these deprecations
    v1.disable_v2_behavior()
    v1.enable_resource_variables()
    # TensorFlow 1 has it in the base class, newer ones for reference variables alone.
    tf.Variable.initialized_value = v1.Variable.initialized_value
    v1.flags.FlagsError = v1.flags.Error  # its name before absl
    _global_step.install()
    _removed.install()
    _imports.install()
    _contrib.install()  # last, because enable_v1() takes it as done
    logger.setLevel(level)
    return v1
