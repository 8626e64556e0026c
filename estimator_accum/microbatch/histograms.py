"""Histograms of micro-batches, added up to that of the batch.

TensorFlow counts in buckets of fixed limits, and writes one limit for empty neighbours.
"""

import functools
from collections.abc import Iterable

import tensorflow as tf


def sum_of_histograms(summaries: Iterable[bytes]) -> bytes:
    """Returns the summary of the rows of all micro-batches.

    Args:
        summaries: Serialized `Summary` of one histogram each, as `HistogramSummary` has
            computed them from the rows of micro-batches.
    """
    parse = tf.compat.v1.Summary.FromString
    return functools.reduce(_sum, map(parse, summaries)).SerializeToString()


def _sum(
    one: tf.compat.v1.Summary, other: tf.compat.v1.Summary
) -> tf.compat.v1.Summary:
    total = tf.compat.v1.Summary()
    total.CopyFrom(one)
    (value,), (added,) = total.value, other.value
    result, added = value.histo, added.histo
    counts = dict(zip(result.bucket_limit, result.bucket, strict=True))
    for limit, count in zip(added.bucket_limit, added.bucket, strict=True):
        counts[limit] = counts.get(limit, 0) + count
    limits = sorted(counts)
    kept = [
        limit
        for limit, after in zip(limits, [*limits[1:], None], strict=True)
        if counts[limit] or after is None or counts[after]
    ]
    del result.bucket_limit[:], result.bucket[:]
    result.bucket_limit.extend(kept)
    result.bucket.extend(counts[limit] for limit in kept)
    result.min, result.max = min(result.min, added.min), max(result.max, added.max)
    for name in ("num", "sum", "sum_squares"):
        setattr(result, name, getattr(result, name) + getattr(added, name))
    return total
