"""GLUE's metrics as streaming `eval_metric_ops`, over all batches of an evaluation."""

import numpy as np
import tensorflow as tf

from bert_finetune.diagnosis import ONLY_CLASS

Metric = tuple[tf.Tensor, tf.Tensor]


def eval_metric_ops(
    names: tuple[str, ...],
    labels: tf.Tensor,
    logits: tf.Tensor,
    per_example_loss: tf.Tensor,
) -> dict[str, Metric]:
    """Returns (value, update op) pairs by their names in `eval_results.txt`.

    `ONLY_CLASS` is in no file: the class of all predictions, or -1 if they differ.

    Args:
        names: Metrics out of accuracy, f1 (of class 1) and matthews_correlation; of a
            regression, out of pearson and spearman; of several labels, out of f1 (of
            all labels together) and roc_auc (the mean over the labels).
        labels: int32 [B], float32 [B] of a regression, or int32 [B, C] of several labels.
        logits: [B, classes]; two classes for f1 and matthews_correlation, one column
            for a regression.
        per_example_loss: [B].
    """
    ops = {"eval_loss": tf.compat.v1.metrics.mean(per_example_loss)}
    if labels.dtype.is_floating:
        return ops | _correlations(names, labels, logits[:, 0])
    if labels.shape.rank == 2:
        return ops | _of_several_labels(names, labels, logits)
    predicted = tf.argmax(logits, axis=-1, output_type=tf.int32)
    ops["eval_accuracy"] = tf.compat.v1.metrics.accuracy(labels, predicted)
    ops[ONLY_CLASS] = _only_class(predicted)
    if "f1" in names:
        ops["f1"] = _f1(labels, predicted)
    if "matthews_correlation" in names:
        ops["matthews_correlation"] = _matthews_correlation(labels, predicted)
    return ops


def _of_several_labels(
    names: tuple[str, ...], labels: tf.Tensor, logits: tf.Tensor
) -> dict[str, Metric]:
    ops = {}
    if "f1" in names:
        ops["f1"] = _f1(labels, tf.cast(logits > 0, tf.int32))
    if "roc_auc" in names:
        ops["roc_auc"] = _roc_auc(labels, logits)
    return ops


def _roc_auc(labels: tf.Tensor, logits: tf.Tensor) -> Metric:
    """Returns the mean area under the curve of the labels that some rows have, not all.

    (sum of the ranks of the positive rows - p (p + 1) / 2) / (p n)

    for p positive and n negative rows, which are all kept. 0 without such a label.
    """
    width = labels.shape[1]
    kept = _variable(np.zeros([0, 2, width]), "labels_and_logits", [None, 2, width])
    new = tf.stack([tf.cast(labels, tf.float64), tf.cast(logits, tf.float64)], axis=1)
    update = kept.assign(tf.concat([kept.read_value(), new], 0)).op

    def area(kept):
        label, logit = tf.unstack(tf.transpose(kept, [1, 2, 0]))  # [C, examples]
        ranks = (_ranks(logit) + 1) / 2
        positive = tf.reduce_sum(label, 1)
        pairs = positive * tf.reduce_sum(1 - label, 1)
        least = positive * (positive + 1) / 2
        areas = tf.math.divide_no_nan(tf.reduce_sum(ranks * label, 1) - least, pairs)
        counts = tf.cast(pairs > 0, tf.float64)
        return tf.math.divide_no_nan(tf.reduce_sum(areas), tf.reduce_sum(counts))

    with tf.control_dependencies([update]):
        after = kept.read_value()
    return area(kept.read_value()), area(after)


def _only_class(predicted: tf.Tensor) -> Metric:
    bounds = _variable([np.inf, -np.inf], "bounds", [2])  # of all predictions so far
    predicted = tf.cast(predicted, tf.float32)
    low, high = tf.unstack(bounds.read_value())
    low = tf.minimum(low, tf.reduce_min(predicted))
    high = tf.maximum(high, tf.reduce_max(predicted))
    with tf.control_dependencies([bounds.assign([low, high]).op]):
        after = bounds.read_value()
    value = lambda bounds: tf.where(tf.equal(bounds[0], bounds[1]), bounds[0], -1.0)
    return value(bounds), value(after)


def _f1(labels: tf.Tensor, predicted: tf.Tensor) -> Metric:
    """Returns 2 tp / (2 tp + fp + fn); 0 if no label and no prediction is positive."""

    def f1(counts):
        tp, _, fp, fn = counts
        return tf.math.divide_no_nan(2 * tp, 2 * tp + fp + fn)

    return _of_counts(f1, labels, predicted)


def _matthews_correlation(labels: tf.Tensor, predicted: tf.Tensor) -> Metric:
    """Returns the Matthews correlation; 0 where the formula is 0 / 0.

    (tp tn - fp fn) / sqrt((tp+fp)(tp+fn)(tn+fp)(tn+fn))
    """

    def matthews_correlation(counts):
        tp, tn, fp, fn = counts
        # Roots first: the product of four counts exceeds float32's exact integers.
        norm = tf.sqrt((tp + fp) * (tp + fn)) * tf.sqrt((tn + fp) * (tn + fn))
        return tf.math.divide_no_nan(tp * tn - fp * fn, norm)

    return _of_counts(matthews_correlation, labels, predicted)


def _of_counts(formula, labels: tf.Tensor, predicted: tf.Tensor) -> Metric:
    metrics = tf.compat.v1.metrics
    counters = [
        counter(tf.equal(labels, 1), tf.equal(predicted, 1))
        for counter in (
            metrics.true_positives,
            metrics.true_negatives,
            metrics.false_positives,
            metrics.false_negatives,
        )
    ]
    values, updates = zip(*counters, strict=True)
    return formula(values), formula(updates)


def _correlations(
    names: tuple[str, ...], labels: tf.Tensor, predicted: tf.Tensor
) -> dict[str, Metric]:
    """Returns the correlations of all labels with all predictions, which are kept."""
    pairs = _variable(np.zeros([0, 2]), "pairs", [None, 2])
    new = tf.cast(tf.stack([labels, predicted], axis=1), tf.float64)  # [B, 2]
    update = pairs.assign(tf.concat([pairs.read_value(), new], 0)).op
    formulas = {"pearson": _pearson, "spearman": _spearman}
    with tf.control_dependencies([update]):
        after = pairs.read_value()
    return {name: (formulas[name](pairs), formulas[name](after)) for name in names}


def _variable(initial, name: str, shape: list[int | None]) -> tf.Variable:
    graph_keys = tf.compat.v1.GraphKeys
    return tf.compat.v1.Variable(
        initial,
        trainable=False,
        collections=[graph_keys.LOCAL_VARIABLES, graph_keys.METRIC_VARIABLES],
        name=name,
        use_resource=True,
        shape=shape,
    )


def _pearson(pairs: tf.Tensor) -> tf.Tensor:
    """Returns the correlation of two columns; 0 if one of them is constant."""
    x, y = tf.unstack(pairs - tf.reduce_mean(pairs, axis=0), axis=1)
    norm = tf.sqrt(tf.reduce_sum(x * x)) * tf.sqrt(tf.reduce_sum(y * y))
    return tf.math.divide_no_nan(tf.reduce_sum(x * y), norm)


def _spearman(pairs: tf.Tensor) -> tf.Tensor:
    """Returns the Pearson correlation of the ranks; equal values share their mean."""
    return _pearson(tf.transpose(_ranks(tf.transpose(pairs))))


def _ranks(columns: tf.Tensor) -> tf.Tensor:
    """Returns twice the mean rank of each number in its row, less 1, float64 [C, N]."""
    ordered = tf.sort(columns)
    first = tf.searchsorted(ordered, columns, "left")
    behind = tf.searchsorted(ordered, columns, "right")
    return tf.cast(first + behind, tf.float64)
