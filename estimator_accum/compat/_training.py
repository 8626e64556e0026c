"""Training of tf.estimator in TF_CONFIG clusters, one task per process.

Replaces TensorFlow 2.15's `tensorflow.python.distribute.estimator_training`.
"""

import copy
import importlib

import tensorflow as tf

_INDEPENDENT_WORKER = "independent_worker"


def init_run_config(config, tf_config: dict) -> None:
    """Completes a RunConfig that has a strategy.

    Decides whether `train_and_evaluate` uses TensorFlow's distribute coordinator, which
    needs a training strategy and a TF_CONFIG cluster of `chief`, `worker`, `ps` and
    `evaluator` tasks. Older clusters have a `master` instead and do not use it.
    """
    distribute = config._experimental_distribute
    if distribute is not None and distribute.remote_cluster:
        raise ValueError(
            "`experimental_distribute.remote_cluster` must be None on TensorFlow 2.16 "
            "and later: one client cannot drive a cluster there. Received: "
            f"{distribute.remote_cluster}. Start each task with its own TF_CONFIG."
        )
    for name in ("train_distribute", "eval_distribute"):
        strategy = getattr(distribute, name, None)
        if not strategy:
            continue
        if getattr(config, f"_{name}"):
            raise ValueError(
                f"Either `{name}` or `experimental_distribute.{name}` can be set. "
                "Received: both. Leave one of them out."
            )
        setattr(config, f"_{name}", strategy)
    cluster = tf.train.ClusterSpec(tf_config.get("cluster", {}))
    if cluster and config._train_distribute and "master" not in cluster.jobs:
        config._init_distributed_setting_from_environment_var({})
        config._cluster_spec = cluster  # the coordinator sets the rest later
        config._distribute_coordinator_mode = _INDEPENDENT_WORKER
        return
    config._distribute_coordinator_mode = None
    config._init_distributed_setting_from_environment_var(tf_config)
    config._maybe_overwrite_session_config_for_distributed_training()


def should_run_distribute_coordinator(config) -> bool:
    mode = getattr(config, "_distribute_coordinator_mode", None)
    return mode == _INDEPENDENT_WORKER and bool(config.cluster_spec)


def train_and_evaluate(estimator, train_spec, eval_spec, executor_class) -> None:
    """Runs this process's task of the cluster, of any type, to its end."""
    coordinator = importlib.import_module(
        "tensorflow.python.distribute.distribute_coordinator"
    )

    def train(strategy):
        local = _for_this_task(estimator, "train", strategy)
        local.train(
            train_spec.input_fn,
            hooks=list(train_spec.hooks),
            max_steps=train_spec.max_steps,
        )

    def evaluate(strategy):
        local = _for_this_task(estimator, "eval", strategy)
        executor_class(local, train_spec, eval_spec)._start_continuous_evaluation()

    coordinator.run_distribute_coordinator(
        train,
        estimator.config.train_distribute,
        eval_fn=evaluate,
        eval_strategy=estimator.config.eval_distribute,
        mode=_INDEPENDENT_WORKER,
        session_config=estimator.config.session_config,
    )


def _for_this_task(estimator, kind: str, strategy):
    """Returns a copy with its own task and server, and without a coordinator."""
    context = importlib.import_module(
        "tensorflow.python.distribute.distribute_coordinator_context"
    ).get_current_worker_context()
    local = copy.deepcopy(estimator)
    setattr(local, f"_{kind}_distribution", strategy)
    cluster, is_evaluator = context.cluster_spec, context.task_type == "evaluator"
    jobs = cluster.as_dict() if cluster and not is_evaluator else {}
    workers = len(jobs.get("chief", [])) + len(jobs.get("worker", []))
    settings = {
        f"{kind}_distribute": strategy,
        "distribute_coordinator_mode": None,  # or it would start a coordinator again
        "service": None,
        "task_type": context.task_type,
        "task_id": context.task_id,
        "master": context.master_target,
        "evaluation_master": context.master_target,
        "is_chief": context.is_chief,
        # An evaluator is alone: it reads checkpoints and talks to no other task.
        "cluster_spec": tf.train.ClusterSpec({}) if is_evaluator else cluster,
        "num_ps_replicas": len(jobs.get("ps", [])),
        "num_worker_replicas": workers if cluster else 1,
        "global_id_in_cluster": None if is_evaluator else global_id(jobs, context),
    }
    for name, value in settings.items():
        setattr(local._config, f"_{name}", value)
    return local


def global_id(jobs: dict[str, list], context) -> int:
    """Returns the task's number: chief 0, then jobs by name, parameter servers last."""
    if not context.task_type:
        return 0
    order = sorted(jobs, key=lambda job: (job != "chief", job == "ps", job))
    before = order[: order.index(context.task_type)]
    return sum(len(jobs[job]) for job in before) + context.task_id


def refusing_method(method: str):
    def refuse(estimator, distributed_fn, hooks):
        del estimator, distributed_fn, hooks
        raise ValueError(
            f"`Estimator.{method}` must run without a strategy for a TF_CONFIG cluster: "
            "its tasks would not start together. Received: a cluster and a strategy. "
            "Use tf.estimator.train_and_evaluate."
        )

    return refuse
