"""Metrics of TensorFlow 1's `tf.contrib.metrics`: (value, operation that updates it)."""

import math

import tensorflow.compat.v1 as tf

_COLLECTIONS = [tf.GraphKeys.LOCAL_VARIABLES, tf.GraphKeys.METRIC_VARIABLES]


def _collected(metric):
    """Returns a metric whose value and operation are added to collections."""

    def collected(
        predictions,
        labels,
        weights=None,
        metrics_collections=None,
        updates_collections=None,
        name=None,
    ):
        value, update = metric(predictions, labels, weights, name)
        tf.add_to_collections(metrics_collections or [], value)
        tf.add_to_collections(updates_collections or [], update)
        return value, update

    collected.__name__ = collected.__qualname__ = metric.__name__
    collected.__doc__ = metric.__doc__
    return collected


@_collected
def streaming_covariance(predictions, labels, weights, name):
    """Covariance over all batches, `sum w (x - mean x) (y - mean y) / (sum w - 1)`.

    NaN where the sum of weights is not above 1.

    Args:
        predictions: Tensor x.
        labels: Tensor y of the same shape.
        weights: Tensor w that can be broadcast to that shape; None for 1.
        metrics_collections: Collections of the value.
        updates_collections: Collections of the operation.
        name: Name of the scope.
    """
    with tf.variable_scope(name, "covariance", (predictions, labels, weights)):
        x, y, w = _aligned(predictions, labels, weights)
        names = ("count", "mean_prediction", "mean_label", "comoment")
        count, mean_x, mean_y, comoment = (
            tf.get_variable(
                part,
                [],
                initializer=tf.zeros_initializer(),
                trainable=False,
                collections=_COLLECTIONS,
            )
            for part in names
        )
        added = tf.reduce_sum(w)
        new_count = count.assign_add(added)
        centers, shifts, waits = [], [], []
        for mean, values in ((mean_x, x), (mean_y, y)):
            center = tf.div_no_nan(tf.reduce_sum(w * values), added)
            shift = center - mean  # from the batches before
            waits.append(mean.assign_add(tf.div_no_nan(shift * added, new_count)))
            centers.append(center)
            shifts.append(shift)
        inside = tf.reduce_sum(w * (x - centers[0]) * (y - centers[1]))
        between = tf.div_no_nan((new_count - added) * added, new_count)
        with tf.control_dependencies(waits):
            moved = comoment.assign_add(inside + shifts[0] * shifts[1] * between)
        value = _divided(comoment, count, "covariance")
        return value, _divided(moved, new_count, "update_op")


@_collected
def streaming_pearson_correlation(predictions, labels, weights, name):
    """Pearson's correlation over all batches; arguments as `streaming_covariance`."""
    with tf.variable_scope(name, "pearson_r", (predictions, labels, weights)):
        pairs = {
            "covariance": (predictions, labels),
            "variance_predictions": (predictions, predictions),
            "variance_labels": (labels, labels),
        }
        metrics = [
            streaming_covariance(*pair, weights, name=part)
            for part, pair in pairs.items()
        ]
        return tuple(
            tf.truediv(both, tf.sqrt(x) * tf.sqrt(y))
            for both, x, y in zip(*metrics, strict=True)
        )


def _aligned(predictions, labels, weights):
    """Returns predictions, labels and weights, all float32 and of one shape."""
    x, y = (tf.cast(tensor, tf.float32) for tensor in (predictions, labels))
    x.shape.assert_is_compatible_with(y.shape)
    ones = tf.ones_like(y)
    return x, y, ones if weights is None else ones * tf.cast(weights, tf.float32)


def _divided(comoment, count, name: str):
    return tf.where(count > 1, comoment / (count - 1), math.nan, name=name)
