"""`--strategy none|mirrored|multi_worker`: from the word to a `tf.distribute` strategy.

none          one replica
mirrored      a replica on each GPU of this machine (or on each logical CPU)
multi_worker  a replica on each GPU of each task, or one a task, of the cluster
              that `TF_CONFIG` or Slurm describes; alone without either, or with
              one task
"""

from collections.abc import Mapping

import tensorflow as tf

from estimator_accum.cluster import Cluster, enter, read_cluster

STRATEGIES = ("none", "mirrored", "multi_worker")


def read_cluster_of(strategy: str, environment: Mapping[str, str]) -> Cluster:
    """Returns the cluster in which this process trains, and evaluates at the end.

    Args:
        strategy: One of `STRATEGIES`; only "multi_worker" trains in a cluster.
        environment: Variables such as those of `os.environ`.

    Raises:
        ValueError: If `strategy` is none of them, or the environment describes another
            run than it: `TF_CONFIG` a cluster of several tasks, or an evaluator.
    """
    if strategy not in STRATEGIES:
        raise ValueError(
            f"`--strategy` must be one of {', '.join(STRATEGIES)}. "
            f"Received: {strategy!r}. Use none to train on one device."
        )
    if strategy == "multi_worker":
        cluster = read_cluster(environment)
        if cluster.is_evaluator:
            raise ValueError(
                'The tasks of `TF_CONFIG["cluster"]` must train here: the first of them '
                "evaluates when training ends. Received: an evaluator. Leave it out."
            )
        return cluster if cluster.num_workers > 1 else Cluster()
    # Not Slurm: its tasks may be so many runs of their own.
    if environment.get("TF_CONFIG"):
        cluster = read_cluster(environment)
        if cluster.num_workers > 1 or cluster.is_evaluator:
            raise ValueError(
                "`--strategy` must be multi_worker in a cluster, or its tasks would "
                f"train over one another. Received: {strategy} in a `TF_CONFIG` with "
                f"{cluster.num_workers} tasks that train. Use --strategy=multi_worker, "
                "or unset TF_CONFIG."
            )
    return Cluster()


def count_replicas(strategy: str, cluster: Cluster) -> int:
    """Returns how many replicas train in sync, those of all tasks."""
    return count_local_replicas(strategy) * cluster.num_workers


def count_local_replicas(strategy: str) -> int:
    """Returns how many replicas train in this process."""
    if strategy == "none":
        return 1
    gpus = len(tf.config.list_logical_devices("GPU"))
    if gpus or strategy == "multi_worker":
        return max(gpus, 1)
    return len(tf.config.list_logical_devices("CPU"))


def make_strategy(strategy: str, cluster: Cluster) -> tf.distribute.Strategy | None:
    """Makes what `RunConfig(train_distribute=...)` takes; None for one replica alone.

    The environment gets the cluster's `TF_CONFIG`, which strategy and Estimator read;
    `enter(Cluster())` takes it away, for an evaluation that needs no other task.

    Args:
        strategy: One of `STRATEGIES`.
        cluster: What `read_cluster_of` says.
    """
    enter(cluster)
    if not cluster.is_alone:
        # Or the strategy would start a server of its own, beside Estimator's.
        tf.compat.v1.disable_eager_execution()
        return tf.distribute.MultiWorkerMirroredStrategy()
    if strategy != "mirrored" and count_local_replicas(strategy) == 1:
        return None
    if tf.config.list_logical_devices("GPU"):
        return tf.distribute.MirroredStrategy()
    # The default reduction waits for ever between several CPUs of a graph.
    cpus = [device.name for device in tf.config.list_logical_devices("CPU")]
    return tf.distribute.MirroredStrategy(
        cpus, cross_device_ops=tf.distribute.ReductionToOneDevice()
    )


def make_session_config(strategy: str) -> tf.compat.v1.ConfigProto | None:
    """Makes what `RunConfig(session_config=...)` takes; None is Estimator's own.

    A session has one CPU, whatever was configured, unless it is told.
    """
    if strategy != "mirrored":
        return None
    cpus = len(tf.config.list_logical_devices("CPU"))
    return tf.compat.v1.ConfigProto(
        allow_soft_placement=True, device_count={"CPU": cpus}
    )
