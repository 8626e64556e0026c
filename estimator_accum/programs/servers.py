"""Parts of a program for clusters with parameter servers."""

import json
import threading

import tensorflow as tf

from estimator_accum import get_or_create_update_step
from estimator_accum.programs.cluster import Cluster


def serve(cluster: Cluster) -> None:
    """Holds variables for the other tasks, until this process is ended.

    Args:
        cluster: Cluster of which this process is a parameter server.
    """
    server = tf.distribute.Server(
        json.loads(cluster.tf_config())["cluster"],
        cluster.task_type,
        cluster.task_index,
        config=tf.compat.v1.ConfigProto(device_count={"GPU": 0}),  # for the workers
    )
    try:
        threading.Event().wait()  # unlike server.join(), it lets Ctrl-C end it
    finally:
        del server


class StopAtUpdate(tf.compat.v1.train.SessionRunHook):
    """Stops a worker when all workers together have made a number of updates.

    `max_steps` would count the micro-steps of open windows, too, and end some updates
    early. Updates that other workers make at the same time come on top.

    Args:
        updates: Updates of the whole run.
    """

    def __init__(self, updates: int):
        self._updates = updates

    def begin(self) -> None:
        self._update_step = get_or_create_update_step()

    def before_run(self, run_context):
        return tf.compat.v1.train.SessionRunArgs(self._update_step)

    def after_run(self, run_context, run_values) -> None:
        updates = run_values.results
        if updates + 1 >= self._updates:  # it may have been read before this update
            updates = run_context.session.run(self._update_step)
        if updates >= self._updates:
            run_context.request_stop()
