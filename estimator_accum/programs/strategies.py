"""The `tf.distribute` strategy of `--strategy`.

none              one replica
mirrored          a replica on each GPU of this machine (or on each logical CPU)
multi_worker      a replica on each GPU of each task (or one per task) of the cluster
                  that `TF_CONFIG` or a launcher describes; one process alone without a
                  cluster or with one task
parameter_server  one replica, which shares the weights on the servers with the other
                  workers and does not wait for them; one process alone without a
                  cluster
"""

import tensorflow as tf

from estimator_accum import mixed_precision_config
from estimator_accum.programs.cluster import Cluster, enter
from estimator_accum.programs.settings import RunSettings


def count_replicas(strategy: str, cluster: Cluster) -> int:
    """Returns the number of replicas that train in sync, over all tasks."""
    num_tasks = 1 if cluster.servers else cluster.num_workers
    return count_local_replicas(strategy) * num_tasks


def local_replicas(strategy: str, cluster: Cluster) -> range:
    """Returns the numbers of this process's replicas among those in sync."""
    local = count_local_replicas(strategy)
    first = 0 if cluster.servers else cluster.rank * local
    return range(first, first + local)


def count_local_replicas(strategy: str) -> int:
    """Returns the number of replicas that train in this process."""
    if strategy in ("none", "parameter_server"):
        return 1
    gpus = len(tf.config.list_logical_devices("GPU"))
    if gpus or strategy == "multi_worker":
        return max(gpus, 1)
    return len(tf.config.list_logical_devices("CPU"))


def make_strategy(strategy: str, cluster: Cluster) -> tf.distribute.Strategy | None:
    """Returns the value of `RunConfig(train_distribute=...)`; None for one replica.

    Puts the cluster's `TF_CONFIG` in the environment, where strategy and Estimator read
    it; `enter(Cluster())` removes it for an evaluation that needs no other task.

    Args:
        strategy: One of `STRATEGIES`.
        cluster: Result of `read_cluster_of`.
    """
    enter(cluster)
    if cluster.servers:
        return None  # Estimator trains with them by itself
    if not cluster.is_alone:
        # Otherwise the strategy would start its own server beside Estimator's.
        tf.compat.v1.disable_eager_execution()
        return tf.distribute.MultiWorkerMirroredStrategy()
    if strategy != "mirrored" and count_local_replicas(strategy) == 1:
        return None
    if tf.config.list_logical_devices("GPU"):
        return tf.distribute.MirroredStrategy()
    # The default reduction hangs between several CPUs of a graph.
    cpus = [device.name for device in tf.config.list_logical_devices("CPU")]
    return tf.distribute.MirroredStrategy(
        cpus, cross_device_ops=tf.distribute.ReductionToOneDevice()
    )


def make_session_config(
    settings: RunSettings, strategy: tf.distribute.Strategy | None
) -> tf.compat.v1.ConfigProto | None:
    """Returns the value of `RunConfig(session_config=...)`; None is Estimator's own.

    By default a session has one CPU, however many logical CPUs were configured.

    Raises:
        ValueError: If `--precision` is not one for this machine or strategy.
    """
    is_served = settings.strategy == "parameter_server"
    if is_served and settings.precision != "float32":
        raise ValueError(
            "`--precision` must be float32 with --strategy=parameter_server. Received: "
            f"{settings.precision}. Leave it out."
        )
    config = None
    if isinstance(strategy, tf.distribute.MirroredStrategy):
        cpus = len(tf.config.list_logical_devices("CPU"))
        config = tf.compat.v1.ConfigProto(
            allow_soft_placement=True, device_count={"CPU": cpus}
        )
    if settings.precision == "float32":
        return config
    return mixed_precision_config(
        settings.precision,
        config,
        is_forced=settings.force_precision,
        is_in_cluster=isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy),
    )


def scaled(
    optimizer: tf.compat.v1.train.Optimizer, settings: RunSettings
) -> tf.compat.v1.train.Optimizer:
    """Returns the optimizer, with a dynamic loss scale if the run needs one."""
    if settings.precision != "float16":
        return optimizer
    return tf.compat.v1.mixed_precision.MixedPrecisionLossScaleOptimizer(
        optimizer, "dynamic"
    )
