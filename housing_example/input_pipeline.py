"""Input pipeline: from CSV files to micro-batches.

`tf.data` reads line by line the two plain CSV files that `jobs.py` writes.

Shapes: B = examples of a micro-batch.
"""

import pathlib
from collections.abc import Callable, Iterable

import tensorflow as tf

from estimator_accum.programs.batches import Batches
from housing_example.table import CATEGORY, COLUMNS, TARGET

_PREFETCHED_BATCHES = 2

InputFn = Callable[[], tf.data.Dataset]


def train_input_fn(
    csv: pathlib.Path,
    batches: Batches,
    *,
    shuffle_buffer: int,
    seed: int,
    replicas: Iterable[int] = (0,),
    first_update: int = 0,
    stride: int = 1,
) -> InputFn:
    """Returns the input_fn for training: endless micro-batches.

    A new epoch may begin inside an update, so that all updates are full. The order of
    the examples does not depend on how an update's examples are divided.

    Args:
        csv: File with the lines of `csv_text`.
        batches: Division of each update's examples.
        shuffle_buffer: Size of the shuffle buffer [examples]; the number of all
            examples shuffles them fully, again in each epoch; 0 keeps the file's order.
        seed: Random seed of the order.
        replicas: Numbers of this process's replicas, which take turns in each
            micro-step.
        first_update: Number of the first update to read.
        stride: Distance between two updates to read, >= 1.
    """
    steps = range(batches.gradient_accumulation_steps)
    shares = [batches.share(step, replica) for step in steps for replica in replicas]

    def input_fn() -> tf.data.Dataset:
        lines = _lines(csv).cache()
        if shuffle_buffer:
            lines = lines.shuffle(shuffle_buffer, seed=seed)
        updates = lines.repeat().batch(batches.effective_batch_size)
        updates = updates.skip(first_update).shard(stride, 0)
        micro_batches = updates.flat_map(cut)
        return micro_batches.map(_parse).prefetch(_PREFETCHED_BATCHES)

    def cut(lines: tf.Tensor) -> tf.data.Dataset:
        bounds = tf.data.Dataset.from_tensor_slices(shares)
        return bounds.map(lambda share: lines[share[0] : share[1]])

    return input_fn


def eval_input_fn(csv: pathlib.Path, batch_size: int) -> InputFn:
    """Returns the input_fn for evaluation and prediction: each example once."""
    return lambda: _lines(csv).batch(batch_size).map(_parse)


def _lines(csv: pathlib.Path) -> tf.data.Dataset:
    return tf.data.TextLineDataset(str(csv)).skip(1)  # the header line


def _parse(lines: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    """Returns (features [B], labels [B, 1]) of lines [B]."""
    kinds = [tf.int64 if name == CATEGORY else tf.float32 for name in COLUMNS]
    cells = tf.io.decode_csv(lines, [tf.constant([], kind) for kind in kinds])
    features = dict(zip(COLUMNS, cells, strict=True))
    labels = features.pop(TARGET)
    return features, labels[:, tf.newaxis]
