"""run_classifier.py on a machine of another kind.

    python other_machine.py logical_cpus=2 dies_after=10 --flags=of run_classifier.py

logical_cpus: number of CPU devices.
dies_after: number of micro-steps of this process after which it is killed.
"""

import os
import signal
import sys

import numpy as np
import tensorflow as tf

from bert_finetune import model_fn, run_classifier
from estimator_accum import per_example


def limited(encode, examples: int, in_every_mode: bool = False):
    """Returns `encode`, which runs out of memory above `examples`.

    Args:
        encode: The encoder.
        examples: Examples for which memory suffices.
        in_every_mode: Whether evaluation and prediction run out of memory too.
    """

    def check(rows):
        if rows > examples:
            raise MemoryError(f"{rows} examples")  # like TensorFlow's own
        return np.int32(0)

    def limited_encode(config, input_ids, *args, is_training, **options):
        if is_training or in_every_mode:
            zero = tf.numpy_function(check, [tf.shape(input_ids)[0]], tf.int32)
            zero.set_shape([])
            input_ids = per_example(input_ids + zero)
        return encode(config, input_ids, *args, is_training=is_training, **options)

    return limited_encode


class _DyingHook(tf.compat.v1.train.SessionRunHook):
    def __init__(self, micro_steps: int):
        self._left = micro_steps

    def after_run(self, run_context, run_values):
        self._left -= 1
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)


def _main(program: str, *arguments: str) -> None:
    flags = [argument for argument in arguments if argument.startswith("--")]
    machine = dict(
        argument.split("=") for argument in arguments if argument not in flags
    )
    if cpus := machine.get("logical_cpus"):
        [device] = tf.config.list_physical_devices("CPU")
        logical = [tf.config.LogicalDeviceConfiguration()] * int(cpus)
        tf.config.set_logical_device_configuration(device, logical)
    if micro_steps := machine.get("dies_after"):
        hook, make_hooks = _DyingHook(int(micro_steps)), model_fn.make_saver_hooks
        model_fn.make_saver_hooks = lambda *args: [*make_hooks(*args), hook]
    run_classifier.main([program, *flags])


if __name__ == "__main__":
    _main(*sys.argv)
