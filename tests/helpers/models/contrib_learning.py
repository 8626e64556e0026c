"""Results of small trainings by `slim.learning`.

`python tests/helpers/models/contrib_learning.py` prints the table RECORDED_LEARNING of
tests/estimator_accum/compat/v1/test_against_tensorflow_1.py. It needs TensorFlow 1.15
on Python 3.7, whose syntax this file therefore keeps to.
"""

import os
import tempfile

import numpy as np

_ROWS = np.sin(np.arange(12.0)).reshape(4, 3).astype(np.float32)
_CASES = {
    "plain": {},
    "clipped": {"clip_gradient_norm": 0.1},
    "multiplied": {
        "gradient_multipliers": {"out/weights": 2.0},
        "summarize_gradients": True,
    },
    "no step": {"global_step": None},
    "no updates": {"update_ops": [], "check_numerics": False},
}


def _loss(tf, slim):
    first, last = tf.constant_initializer(0.3), tf.constant_initializer(0.7)
    net = slim.fully_connected(
        tf.constant(_ROWS),
        2,
        weights_initializer=first,
        normalizer_fn=slim.batch_norm,
        scope="in",
    )
    net = slim.fully_connected(
        net, 1, activation_fn=None, weights_initializer=last, scope="out"
    )
    tf.losses.mean_squared_error(tf.ones([4, 1]), net)
    return tf.losses.get_total_loss()


def record(tf, slim, training):
    """Returns (names, numbers) of each case.

    Args:
        tf: TensorFlow 1's API.
        slim: `tf.contrib.slim`.
        training: `tf.contrib.training`.
    """
    records = {}
    for case, arguments in _CASES.items():
        with tf.Graph().as_default():
            loss, optimizer = _loss(tf, slim), tf.train.MomentumOptimizer(0.1, 0.9)
            op = slim.learning.create_train_op(loss, optimizer, **arguments)
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                losses = [session.run(op) for _ in range(3)]
                records[case] = _noted(
                    tf, op, losses, session.run(tf.global_variables())
                )
    with tf.Graph().as_default(), tempfile.TemporaryDirectory() as folder:
        loss, optimizer = _loss(tf, slim), tf.train.MomentumOptimizer(0.1, 0.9)
        op = training.create_train_op(
            loss,
            optimizer,
            variables_to_train=tf.trainable_variables("out"),
            transform_grads_fn=lambda pairs: training.clip_gradient_norms(pairs, 0.5),
        )
        # No threads, which would execute eagerly under TensorFlow 2's behavior.
        options = {"save_summaries_secs": 0, "save_interval_secs": 0}
        last = slim.learning.train(op, folder, number_of_steps=3, **options)
        files = sorted(f for f in os.listdir(folder) if f.endswith(".index"))
        names = [name for name, _ in tf.train.list_variables(folder)]
        values = [tf.train.load_variable(folder, name) for name in names]
        _, numbers = _noted(tf, op, [last], values)
        records["train"] = " ".join(files + names), numbers
    return records


def _noted(tf, op, losses, values):
    names = [op.name] + [variable.op.name for variable in tf.global_variables()]
    names += sorted(summary.op.name for summary in tf.get_collection("summaries"))
    return " ".join(names), list(losses) + [np.abs(value).sum() for value in values]


def _print_table():
    import tensorflow as tf

    print("RECORDED_LEARNING = {")
    records = record(tf, tf.contrib.slim, tf.contrib.training)
    for case, (names, numbers) in sorted(records.items()):
        rounded = " ".join(f"{number:.6g}" for number in numbers)
        print(f"{case!r}: ({names!r}, {rounded!r}),")
    print("}")


if __name__ == "__main__":
    _print_table()
