"""Lets evaluation and prediction run out of memory, and compares with undisturbed runs.

    python scripts/experiments/disturb_evaluation.py --errors=200

Under `microbatch_model_fn(model_fn, "auto")` a model is evaluated, then used to predict,
again and again, until memory has run out `--errors` times in each: at random, at the
begin or the end of a micro-batch. For each disturbed run there are two undisturbed ones
by the plain Estimator: one takes the same micro-batches as batches of their own, one
the whole batches. Prints a Markdown table with a row for each metric and prediction:

    differences   runs in which it is not bit for bit that of the same micro-batches;
                  the loss: not the mean over the batch of the same micro-batches' losses
    whole batch   largest difference from the whole batches [units in the last place],
                  or 0 and 1 for what is not a floating-point number

Exit codes: 0; 1 if there is a difference, or if a number that counts examples is not
that of the whole batches; 2 for invalid flags.
"""

import argparse
import collections
import logging
import os
import pathlib
import random
import sys
import tempfile
from collections.abc import Callable

import numpy as np

if __name__ == "__main__":  # a clone runs without installation
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

from estimator_accum.runs.command_line import (
    OneSentenceParser,
    check_counts,
    exit_code_of,
)
from estimator_accum.runs.program import quiet_import

with quiet_import(sys.argv[1:]):
    import tensorflow as tf

    from estimator_accum import microbatch_model_fn
    from estimator_accum.compat import enable_estimator

v1 = tf.compat.v1

_EXAMPLES, _BATCH_SIZE, _INPUTS, _CLASSES = 1000, 64, 5, 3  # the last batch is short
_CHANCE = 0.4  # that memory runs out at the begins, or at the ends, of a batch's parts
_JOBS = ("evaluation", "prediction")
_LOSS = "loss"
# Exact at any cut; all else is a floating-point sum or depends on one.
_COUNTS = ("accuracy", "confusion", "examples", "out_of_order", "class", "id", "text")


class _Memory:
    """Memory that runs out at random, and remembers the micro-batches that counted.

    Args:
        random_: Source of the moments.
        errors: How often it runs out.

    Attributes:
        errors: How often it is still to run out.
        kept: For each micro-batch that counted its example numbers, its loss and the
            number of the batch.
    """

    def __init__(self, random_: random.Random, errors: int):
        self._random = random_
        self.errors = errors
        self.kept = {}

    def allocate(self, ids: np.ndarray, loss: np.ndarray, is_end: bool) -> np.float32:
        """Notes a micro-batch, which may be part of a retry; raises MemoryError."""
        first = int(ids[0])
        self.kept = {begin: kept for begin, kept in self.kept.items() if begin < first}
        self.kept[first] = ids.tolist(), np.float32(loss)
        chance = _CHANCE * len(ids) / _BATCH_SIZE
        # One example that does not fit would be refused.
        if self.errors and len(ids) > 1 and self._random.random() < chance:
            self.errors -= 1
            raise MemoryError("at the end" if is_end else "at the begin")
        return np.float32(0)

    def parts(self) -> list[list[int]]:
        """Returns the example numbers of the micro-batches, in their order."""
        return [ids for ids, _ in self.kept.values()]


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line; returns the exit code."""
    parser = OneSentenceParser(__doc__)
    parser.add_numbers(
        ("errors", 200, "out-of-memory errors in each of evaluation and prediction"),
        ("seed", 1, "of the errors' moments, >= 1"),
    )
    flags = parser.parse_args(arguments)
    return exit_code_of(lambda: _disturb(flags))


def _disturb(flags: argparse.Namespace) -> int:
    check_counts(flags)
    enable_estimator()
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    random_ = random.Random(flags.seed)
    print("| job | errors | runs | name | differences | whole batch |")
    print("|---|---|---|---|---|---|")
    is_good = True
    for job in _JOBS:
        left, runs = flags.errors, 0
        differences, from_whole = collections.Counter(), collections.Counter()
        while left:
            ours, same, whole, left = _run(job, random_, left)
            runs += 1
            for name in ours:
                differences[name] += _bytes(ours[name]) != _bytes(same[name])
                distance = _distance(ours[name], whole[name])
                from_whole[name] = max(from_whole[name], distance)
        for name in sorted(from_whole):
            row = (job, flags.errors, runs, name, differences[name], from_whole[name])
            print(f"| {' | '.join(map(str, row))} |", flush=True)
            is_exact = name not in _COUNTS or not from_whole[name]
            is_good = is_good and is_exact and not differences[name]
    return int(not is_good)


def _run(job: str, random_: random.Random, errors: int) -> tuple[dict, dict, dict, int]:
    """Returns the disturbed run's results, the others', and how many errors are left.

    The others are those of the same micro-batches, and of the whole batches.
    """
    memory = _Memory(random_, errors)
    model_fn = microbatch_model_fn(_model_fn(memory), "auto", grow_after=1)
    ours = _results(job, model_fn, _batches())
    quiet = _Memory(random_, 0)
    same = _results(job, _model_fn(quiet), memory.parts())
    if job == _JOBS[0]:
        same[_LOSS] = _loss(list(quiet.kept.values()))
    return ours, same, _results(job, _model_fn(quiet), _batches()), memory.errors


def _batches() -> list[list[int]]:
    ids = list(range(_EXAMPLES))
    return [ids[i : i + _BATCH_SIZE] for i in range(0, _EXAMPLES, _BATCH_SIZE)]


def _results(job: str, model_fn: Callable, batches: list[list[int]]) -> dict:
    """Returns metrics or predictions by name, of an Estimator of its own."""

    def input_fn():
        data = np.random.default_rng(0)
        x = data.normal(size=[_EXAMPLES, _INPUTS]).astype(np.float32)
        labels = data.integers(_CLASSES, size=_EXAMPLES)

        def generate():
            for ids in batches:
                yield {"id": np.array(ids), "x": x[ids]}, labels[ids]

        features = {
            "id": tf.TensorSpec([None], tf.int64),
            "x": tf.TensorSpec([None, _INPUTS]),
        }
        signature = features, tf.TensorSpec([None], tf.int64)
        return tf.data.Dataset.from_generator(generate, output_signature=signature)

    with tempfile.TemporaryDirectory() as folder:
        config = tf.estimator.RunConfig(os.path.join(folder, "model"))
        estimator = tf.estimator.Estimator(model_fn, config=config)
        if job == _JOBS[0]:
            metrics = estimator.evaluate(input_fn)
            del metrics["end"], metrics["global_step"]
            return metrics
        predictions = list(estimator.predict(input_fn))
    names = predictions[0]
    return {name: np.stack([each[name] for each in predictions]) for name in names}


def _model_fn(memory: _Memory) -> Callable:
    """Returns a classifier's model_fn, which allocates what it takes from `memory`."""

    def allocate(after: list, ids, loss, is_end: bool):
        with tf.control_dependencies(after):
            return tf.numpy_function(
                lambda ids, loss: memory.allocate(ids, loss, is_end),
                [ids, loss],
                tf.float32,
            )

    def model_fn(features, labels, mode):
        ids, nothing = features["id"], tf.constant(0.0)
        with tf.control_dependencies([allocate([], ids, nothing, False)]):
            x = tf.identity(features["x"])
        weights = np.linspace(-1, 1, _INPUTS * _CLASSES).astype(np.float32)
        start = np.sin(9 * weights).reshape(_INPUTS, _CLASSES)
        logits = tf.tanh(tf.matmul(x, v1.get_variable("kernel", initializer=start)))
        predictions = {
            "class": tf.argmax(logits, 1),
            "probability": tf.sigmoid(logits),
            "id": ids,
            "text": tf.strings.as_string(ids),
        }
        if mode == tf.estimator.ModeKeys.PREDICT:
            end = allocate(list(predictions.values()), ids, nothing, True)
            with tf.control_dependencies([end]):
                predictions = {
                    name: tf.identity(value) for name, value in predictions.items()
                }
            return tf.estimator.EstimatorSpec(mode, predictions=predictions)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        loss = tf.reduce_mean(losses)
        metrics = _metrics(ids, labels, predictions, losses)
        end = allocate([update for _, update in metrics.values()], ids, loss, True)
        metrics["end"] = nothing, end
        return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)

    return model_fn


def _metrics(ids, labels, predictions: dict, losses) -> dict:
    is_first = tf.equal(labels, 0)
    chance = predictions["probability"][:, 0]
    examples, seen = _counter("examples", [])
    confusion, table = _counter("confusion", [_CLASSES, _CLASSES])
    out_of_order, mistakes = _counter("out_of_order", [])
    expected = seen + tf.range(tf.size(ids, tf.int64))
    wrong = tf.math.count_nonzero(tf.not_equal(ids, expected))
    with tf.control_dependencies([wrong]):
        more = v1.assign_add(examples, tf.size(ids, tf.int64))
    found = tf.math.confusion_matrix(
        labels, predictions["class"], _CLASSES, dtype=tf.int64
    )
    return {
        "accuracy": v1.metrics.accuracy(labels, predictions["class"]),
        "auc": v1.metrics.auc(is_first, chance),
        "class_accuracy": v1.metrics.mean_per_class_accuracy(
            labels, predictions["class"], _CLASSES
        ),
        "confusion": (table, v1.assign_add(confusion, found)),
        "examples": (seen, more),
        "mean_loss": v1.metrics.mean(losses),
        "out_of_order": (mistakes, v1.assign_add(out_of_order, wrong)),
    }


def _counter(name: str, shape: list[int]) -> tuple[tf.Variable, tf.Tensor]:
    """Returns a variable of a metric's own, and its value."""
    variable = v1.get_variable(
        name,
        shape,
        tf.int64,
        v1.zeros_initializer(),
        trainable=False,
        collections=[v1.GraphKeys.LOCAL_VARIABLES],
        use_resource=True,
    )
    return variable, variable.read_value()


def _loss(kept: list[tuple[list[int], np.float32]]) -> np.float32:
    """Returns Estimator's mean over batches of each batch's mean, in float32."""
    batches = collections.defaultdict(list)
    for ids, loss in kept:
        batches[ids[0] // _BATCH_SIZE].append((np.float32(len(ids)), loss))
    losses = np.float32(0)
    for parts in batches.values():
        if len(parts) == 1:
            losses += parts[0][1]
            continue
        total = weight = np.float32(0)
        for size, loss in parts:
            total, weight = size * loss + total, size + weight
        losses += total / weight
    return losses / np.float32(len(batches))


def _bytes(value) -> bytes:
    value = np.asarray(value)
    return str(value.dtype).encode() + (
        repr(value.tolist()).encode() if value.dtype == object else value.tobytes()
    )


def _distance(ours, theirs) -> int:
    """Returns the largest difference, in units in the last place of a float32."""
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    if ours.dtype != np.float32:
        return int(_bytes(ours) != _bytes(theirs))
    steps = [
        value.reshape(-1).view(np.int32).astype(np.int64) for value in (ours, theirs)
    ]
    return int(np.max(np.abs(steps[0] - steps[1])))


if __name__ == "__main__":
    sys.exit(main())
