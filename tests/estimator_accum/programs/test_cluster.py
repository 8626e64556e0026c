"""Every cluster that the environment can describe, and every invalid field."""

import json

import pytest

from estimator_accum.programs.cluster import Cluster, read_cluster

_CLUSTER = {"chief": ["a:1"], "worker": ["b:2", "c:3"]}


def _read(cluster, task) -> Cluster:
    return read_cluster({"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})})


def test_without_variables_one_process_is_alone():
    for environment in ({}, {"TF_CONFIG": ""}, {"SLURM_STEP_NUM_TASKS": "1"}):
        alone = read_cluster(environment)
        assert alone.is_alone and alone.is_chief
        assert (alone.num_workers, alone.rank, alone.name) == (1, 0, "alone")


def test_chief_comes_before_the_workers():
    chief = _read(_CLUSTER, {"type": "chief", "index": 0})
    assert (chief.num_workers, chief.rank, chief.is_chief) == (3, 0, True)
    worker = _read(_CLUSTER, {"type": "worker", "index": 1})
    assert (worker.rank, worker.is_chief, worker.name) == (2, False, "worker 1")


def test_worker_0_is_the_chief_where_there_is_none():
    workers = {"worker": ["a:1", "b:2"]}
    first, second = (_read(workers, {"type": "worker", "index": n}) for n in (0, 1))
    assert (first.is_chief, first.rank) == (True, 0)
    assert (second.is_chief, second.rank, second.num_workers) == (False, 1, 2)


def test_evaluator_trains_nothing_and_is_in_its_own_cluster_alone():
    with_evaluator = {**_CLUSTER, "evaluator": ["d:4"]}
    listed = _read(with_evaluator, {"type": "evaluator", "index": 0})
    unlisted = _read(_CLUSTER, {"type": "evaluator", "index": 0})
    for cluster in (listed, unlisted):
        assert cluster.is_evaluator and cluster.has_evaluator and not cluster.is_chief
        assert cluster.num_workers == 3
        assert json.loads(cluster.tf_config()) == {
            "cluster": {**_CLUSTER, "evaluator": ["localhost:1"]},
            "task": {"type": "evaluator", "index": 0},
        }
    task = {"type": "worker", "index": 1}
    worker = _read(with_evaluator, task)
    assert worker.has_evaluator
    assert json.loads(worker.tf_config()) == {"cluster": _CLUSTER, "task": task}


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("{", r"`TF_CONFIG` must be JSON\. Received: \{ \(.*\)\. Correct it, or unset"),
        ("[]", r"`TF_CONFIG` must be an object .*Received: \[\]\."),
        ("{}", r'`TF_CONFIG\["cluster"\]` must be an object .*Received: none\.'),
    ],
)
def test_text_that_is_no_configuration_is_refused(text, sentence):
    with pytest.raises(ValueError, match=sentence):
        read_cluster({"TF_CONFIG": text})


@pytest.mark.parametrize(
    "cluster, sentence",
    [
        ([], r'\["cluster"\]` must be an object of task types\. Received: \[\]\.'),
        ({"ps": ["a:1"]}, r"only chief, worker and .*Received: ps\. Parameter servers"),
        ({"master": ["a:1"]}, r"Received: master\. Name the task that saves chief"),
        ({"worker": []}, r'\["worker"\]` must be a list of addr.*Received: \[\]\.'),
        ({"worker": "a:1"}, r'a list of addresses\. Received: "a:1"\.'),
        ({"worker": [7]}, r"a list of host:port\. Received: 7\."),
        ({"worker": ["a"]}, r'a list of host:port\. Received: "a"\.'),
        ({"worker": [":1"]}, r'host:port\. Received: ":1"\.'),
        ({"worker": ["grpc://a:1"]}, r'host:port\. Received: "grpc://a:1"\.'),
        ({"worker": ["a:0"]}, r'host:port\. Received: "a:0"\.'),
        ({"worker": ["a:65536"]}, r'host:port\. Received: "a:65536"\.'),
        ({"chief": ["a:1", "b:1"]}, r'\["chief"\]` must be one address\. .* 2 of them'),
        ({"worker": ["a:1", "a:1"]}, r"an address each\. Received: a:1 twice\."),
        ({"chief": ["a:1"], "worker": ["a:1"]}, r"Received: a:1 twice\."),
        ({"evaluator": ["a:1"]}, r"a chief or a worker.*Received: evaluator alone\."),
    ],
)
def test_malformed_cluster_is_refused(cluster, sentence):
    with pytest.raises(ValueError, match=sentence):
        _read(cluster, {"type": "worker", "index": 0})


@pytest.mark.parametrize(
    "task, sentence",
    [
        (None, r'\["task"\]` must be an object with type and.*Received: none\.'),
        ({"index": 0}, r'\["type"\]` must be one of chief, worker, eval.*none\.'),
        ({"type": "ps", "index": 0}, r'must be one of .*Received: "ps"\.'),
        ({"type": "worker"}, r'\["index"\]` must be an integer from 0 to 1 .*none'),
        ({"type": "worker", "index": 2}, r"an integer from 0 to 1 .*Received: 2\."),
        ({"type": "worker", "index": -1}, r"Received: -1\."),
        ({"type": "worker", "index": "0"}, r'Received: "0"\.'),
        ({"type": "worker", "index": True}, r"Received: true\."),
        ({"type": "chief", "index": 1}, r'\["index"\]` must be 0\. Received: 1\.'),
        ({"type": "evaluator", "index": 1}, r'\["index"\]` must be 0\. Received: 1\.'),
    ],
)
def test_malformed_task_is_refused(task, sentence):
    with pytest.raises(ValueError, match=sentence):
        _read(_CLUSTER, task)


def test_chief_has_to_be_in_the_cluster():
    with pytest.raises(ValueError, match=r"one of worker, evaluator\. .*\"chief\""):
        _read({"worker": ["a:1"]}, {"type": "chief", "index": 0})


_SLURM = {"SLURM_JOB_ID": "123456", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
_SLURM |= {"SLURMD_NODENAME": "n9", "SLURM_STEP_NUM_TASKS": "3"}
_SLURM |= {"SLURM_STEP_NODELIST": "n[9-10]", "SLURM_STEP_TASKS_PER_NODE": "2,1"}


@pytest.mark.parametrize(
    "rank, host, local_id, index", [(0, "n9", 0, 1), (1, "n9", 1, 2), (2, "n10", 0, 0)]
)
def test_slurm_task_finds_its_own_address(monkeypatch, rank, host, local_id, index):
    own = {"SLURM_PROCID": rank, "SLURMD_NODENAME": host, "SLURM_LOCALID": local_id}
    environment = _SLURM | {name: str(value) for name, value in own.items()}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    cluster = read_cluster(environment)
    assert cluster.workers == ("n10:23456", "n9:23456", "n9:23457")
    assert (cluster.name, cluster.rank) == (f"worker {index}", index)


def test_tf_config_comes_before_slurm():
    config = {"cluster": _CLUSTER, "task": {"type": "chief", "index": 0}}
    cluster = read_cluster(_SLURM | {"TF_CONFIG": json.dumps(config)})
    assert cluster.chief == "a:1"


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURMD_NODENAME", "SLURM_PROCID"])
def test_slurm_without_a_variable_is_refused(monkeypatch, name):
    for other, value in _SLURM.items():
        monkeypatch.setenv(other, value)
    monkeypatch.delenv(name)
    environment = {key: value for key, value in _SLURM.items() if key != name}
    with pytest.raises(ValueError, match=rf"{name}.*Start the tasks with srun\."):
        read_cluster(environment)
