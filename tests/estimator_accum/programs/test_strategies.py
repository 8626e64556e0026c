"""From `--strategy` to a cluster with a number of replicas."""

import dataclasses
import json
import os

import pytest
import tensorflow as tf

from distributed.main import PROGRAM as IMAGES
from estimator_accum import make_accumulating_train_op
from estimator_accum.programs.cluster import Cluster
from estimator_accum.programs.inputs import Inputs
from estimator_accum.programs.job import make_job, make_train_spec
from estimator_accum.programs.launchers import read_cluster_of
from estimator_accum.programs.progress import Progress
from estimator_accum.programs.servers import StopAtUpdate
from estimator_accum.programs.settings import RunSettings
from estimator_accum.programs.strategies import (
    count_local_replicas,
    count_replicas,
    local_replicas,
    make_session_config,
    make_strategy,
    scaled,
)
from estimator_accum.programs.watchdog import Watchdog

_EXACT = RunSettings(output_dir="", learning_rate=1.0)


def _environment(task_type="worker", workers=2, index=0, **jobs):
    cluster = {"worker": [f"a:{2000 + i}" for i in range(workers)], **jobs}
    task = {"type": task_type, "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


def test_multi_worker_takes_the_cluster_of_the_environment():
    cluster = read_cluster_of("multi_worker", _environment())
    assert (cluster.num_workers, cluster.is_chief) == (2, True)
    assert count_replicas("multi_worker", cluster) == 2


@pytest.mark.parametrize("environment", [{}, _environment(workers=1)])
def test_multi_worker_with_one_task_is_alone(environment):
    cluster = read_cluster_of("multi_worker", environment)
    assert cluster.is_alone
    assert make_strategy("multi_worker", cluster) is None


def test_multi_worker_without_a_cluster_has_the_replicas_that_are_counted(monkeypatch):
    def devices(kind):
        return [f"{kind}:0", f"{kind}:1"] if kind == "GPU" else [f"{kind}:0"]

    monkeypatch.setattr(tf.config, "list_logical_devices", devices)
    monkeypatch.setattr(tf.distribute, "MirroredStrategy", lambda: "both GPUs")
    assert count_replicas("multi_worker", Cluster()) == 2
    assert make_strategy("multi_worker", Cluster()) == "both GPUs"


@pytest.mark.parametrize("strategy", ["none", "mirrored"])
def test_one_task_may_have_a_tf_config_of_its_own(strategy, monkeypatch):
    cluster = read_cluster_of(strategy, _environment(workers=1))
    monkeypatch.setenv("TF_CONFIG", "of that task")
    make_strategy(strategy, cluster)
    assert cluster.is_alone and "TF_CONFIG" not in os.environ


@pytest.mark.parametrize("strategy", ["none", "mirrored"])
def test_tasks_of_a_slurm_step_may_be_runs_of_their_own(strategy):
    assert read_cluster_of(strategy, {"SLURM_STEP_NUM_TASKS": "4"}).is_alone


@pytest.mark.parametrize("task_type", ["worker", "evaluator"])
@pytest.mark.parametrize("strategy", ["none", "mirrored"])
def test_cluster_without_multi_worker_is_refused(strategy, task_type):
    message = (
        rf"^`--strategy` must be multi_worker in a cluster.* Received: {strategy} in a "
        r"`TF_CONFIG` with 2 tasks that train\. Use --strategy=multi_worker, or unset"
    )
    with pytest.raises(ValueError, match=message):
        read_cluster_of(strategy, _environment(task_type))


def test_evaluator_task_is_refused():
    message = r"must train here: .* Received: an evaluator\. Leave it out\.$"
    with pytest.raises(ValueError, match=message):
        read_cluster_of("multi_worker", _environment("evaluator"))


@pytest.mark.parametrize(
    ("strategy", "environment", "sentence"),
    [
        ("none", _environment(ps=["b:1"]), "Received: none, with 1 of ps. Use --strat"),
        ("multi_worker", _environment(ps=["b:1"]), "Received: multi_worker, with 1 of"),
        ("parameter_server", _environment(), "a cluster of 2 tasks that train, withou"),
    ],
)
def test_parameter_servers_without_their_strategy_are_refused(
    strategy, environment, sentence
):
    with pytest.raises(ValueError, match=rf"^`--strategy.*{sentence}"):
        read_cluster_of(strategy, environment)


@pytest.mark.parametrize(
    ("environment", "task", "turn"),
    [
        (_environment(ps=["b:1"]), {"type": "chief", "index": 0}, (5, 2)),
        (_environment(ps=["b:1"], index=1), {"type": "worker", "index": 0}, (6, 2)),
        (_environment("ps", ps=["b:1"]), {"type": "ps", "index": 0}, None),
        (
            _environment(chief=["c:1"], ps=["b:1"], index=1),
            {"type": "worker", "index": 1},
            (7, 3),
        ),
        (_environment(workers=1, ps=["b:1"]), {"type": "chief", "index": 0}, (5, 1)),
    ],
)
def test_workers_of_parameter_servers_have_a_chief_and_take_turns(
    environment, task, turn, monkeypatch
):
    cluster = read_cluster_of("parameter_server", environment)
    monkeypatch.setenv("TF_CONFIG", "")
    assert make_strategy("parameter_server", cluster) is None
    config = json.loads(os.environ["TF_CONFIG"])
    assert config["task"] == task and len(config["cluster"]["chief"]) == 1
    assert cluster.is_server if turn is None else cluster.turn(5) == turn
    assert count_replicas("parameter_server", cluster) == 1
    assert local_replicas("parameter_server", cluster) == range(1)


def test_parameter_server_without_a_cluster_is_alone():
    assert read_cluster_of("parameter_server", {}).is_alone


def test_an_evaluator_stops_by_steps_and_a_worker_by_updates(tmp_path):
    settings = IMAGES.settings(output_dir=str(tmp_path))
    specs = []
    for task in ("chief", "evaluator"):
        variables = _environment(task, chief=["c:1"], ps=["b:1"])
        cluster = read_cluster_of("parameter_server", variables, may_evaluate=True)
        job = make_job(Inputs(settings, cluster, None, None, "checksum"), 2)
        watchdog = Watchdog(60, "it")
        specs.append(make_train_spec(job, dict, Progress(40, 10, 0), 20, 15, watchdog))
    assert [spec.max_steps for spec in specs] == [None, 60]
    counts = [sum(isinstance(h, StopAtUpdate) for h in spec.hooks) for spec in specs]
    assert counts == [1, 0]


@pytest.mark.parametrize("steps", [1, 3])
def test_a_worker_stops_at_the_last_update(steps):
    """Not one micro-step later, which would be an update where K is 1."""
    with tf.Graph().as_default():
        tf.compat.v1.train.create_global_step()
        loss = tf.compat.v1.get_variable("x", initializer=1.0) ** 2
        optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.1)
        train_op = make_accumulating_train_op(loss, optimizer, steps)
        hooks, runs = [StopAtUpdate(4)], 0
        with tf.compat.v1.train.MonitoredSession(hooks=hooks) as session:
            while not session.should_stop():
                session.run(train_op)
                runs += 1
    assert runs == 4 * steps


def test_none_is_one_replica_without_a_strategy():
    assert make_strategy("none", Cluster()) is None
    assert make_session_config(_EXACT, None) is None
    assert count_replicas("none", Cluster()) == 1


def test_mirrored_has_the_replicas_that_it_was_said_to_have():
    strategy = make_strategy("mirrored", Cluster())
    replicas = count_replicas("mirrored", Cluster())
    assert isinstance(strategy, tf.distribute.MirroredStrategy)
    assert strategy.num_replicas_in_sync == replicas == count_local_replicas("mirrored")
    config = make_session_config(_EXACT, strategy)
    assert config.allow_soft_placement  # for operations that have no kernel there
    assert config.device_count["CPU"] == len(tf.config.list_logical_devices("CPU"))


def test_float16_has_a_loss_scale_and_low_precision_a_config_of_its_own():
    adam = tf.compat.v1.train.AdamOptimizer()
    assert scaled(adam, _EXACT) is adam
    low = dataclasses.replace(_EXACT, precision="float16")
    assert isinstance(
        scaled(adam, low), tf.compat.v1.mixed_precision.MixedPrecisionLossScaleOptimizer
    )
    options = make_session_config(low, None).graph_options.rewrite_options
    assert options.auto_mixed_precision_cpu or options.auto_mixed_precision
    served = dataclasses.replace(low, strategy="parameter_server")
    with pytest.raises(ValueError, match="Received: float16. Leave it out"):
        make_session_config(served, None)
