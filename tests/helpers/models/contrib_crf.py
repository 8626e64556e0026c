"""Results of small random fields of `tf.contrib.crf`.

`python tests/helpers/models/contrib_crf.py` prints the table RECORDED_CRF of
tests/estimator_accum/compat/v1/test_against_tensorflow_1.py. It needs TensorFlow 1.15
on Python 3.7, whose syntax this file therefore keeps to.
"""

import numpy as np

_LENGTHS = np.array([4, 2, 1, 0, 3])
_TAGS = np.array([[0, 2, 1, 1], [2, 1, 0, 0], [1, 0, 0, 5], [0] * 4, [1, 1, 2, 0]])
_TRANSITIONS = np.sin(np.arange(9.0) * 2).reshape(3, 3).astype(np.float32)
_SCORES = (2 * np.cos(np.arange(60.0) ** 1.3)).reshape(5, 4, 3).astype(np.float32)


def record(tf, crf):
    """Returns the numbers that each function gives, by its name.

    Args:
        tf: TensorFlow 1's API.
        crf: `tf.contrib.crf`.
    """
    results = {}
    for steps in (4, 1):
        for is_static in (True, False):
            results.update(_record(tf, crf, steps, is_static))
    tags, score = crf.viterbi_decode(_SCORES[0], _TRANSITIONS)
    results["viterbi_decode"] = [*map(float, tags), float(score)]
    return {name: [round(float(x), 5) for x in xs] for name, xs in results.items()}


def _record(tf, crf, steps, is_static):
    with tf.Graph().as_default():
        shape = [5, steps, 3] if is_static else [None, None, 3]
        inputs = tf.placeholder(tf.float32, shape)
        tags = tf.constant(_TAGS[:, :steps], tf.int64 if is_static else tf.int32)
        if not is_static:
            tags = tf.placeholder_with_default(tags, [None, None])
        lengths = tf.constant(_LENGTHS if is_static else np.minimum(_LENGTHS, steps))
        if is_static:
            lengths = tf.minimum(tf.cast(lengths, tf.int32), steps)
        transitions = tf.constant(_TRANSITIONS)
        likelihood, _ = crf.crf_log_likelihood(inputs, tags, lengths, transitions)
        bitmap = tf.constant(_TAGS[:, :steps, None] <= [[[0, 1, 2]]])
        decoded, best = crf.crf_decode(inputs, transitions, lengths)
        tensors = {
            "likelihood": likelihood,
            "gradient": tf.gradients(likelihood, inputs)[0],
            "of transitions": tf.gradients(likelihood, transitions)[0],
            "score": crf.crf_sequence_score(inputs, tags, lengths, transitions),
            "multitag": crf.crf_multitag_sequence_score(
                inputs, bitmap, lengths, transitions
            ),
            "norm": crf.crf_log_norm(inputs, lengths, transitions),
            "unary": crf.crf_unary_score(tags, lengths, inputs),
            "binary": crf.crf_binary_score(tags, lengths, transitions),
            "decoded": decoded,
            "best": best,
        }
        assert decoded.dtype == tf.int32
        tensors = {name: t for name, t in tensors.items() if t is not None}
        with tf.variable_scope("head"):
            _, created = crf.crf_log_likelihood(inputs, tags, lengths)
        assert [v.op.name for v in tf.trainable_variables()] == ["head/transitions"]
        assert created.shape.as_list() == [3, 3]
        with tf.Session() as session:
            values = session.run(tensors, {inputs: _SCORES[:, :steps]})
    place = "{}, {} steps{}: ".format("crf", steps, "" if is_static else " at last")
    return {place + name: np.ravel(value) for name, value in values.items()}


def _print_table():
    import tensorflow as tf

    print("RECORDED_CRF = {")
    for name, numbers in sorted(record(tf, tf.contrib.crf).items()):
        print("{!r}: {!r},".format(name, " ".join(f"{n:g}" for n in numbers)))
    print("}")


if __name__ == "__main__":
    _print_table()
