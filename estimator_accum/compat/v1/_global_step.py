"""The global step that is found by its name, as TensorFlow 1 finds it."""

import functools

import tensorflow.compat.v1 as tf
from tensorflow.python.training import training_util


def install() -> None:
    """Makes a resource variable that is named global_step the global step.

    TensorFlow looks for the output of that operation, which is the variable's handle,
    and refuses it.
    """
    original = training_util.get_global_step

    @functools.wraps(original)
    def get_global_step(graph=None):
        graph = graph or tf.get_default_graph()
        if not graph.get_collection(tf.GraphKeys.GLOBAL_STEP):
            for variable in graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES):
                if variable.op.name == "global_step":
                    training_util.assert_global_step(variable)
                    return variable
        return original(graph)

    training_util.get_global_step = tf.train.get_global_step = get_global_step
