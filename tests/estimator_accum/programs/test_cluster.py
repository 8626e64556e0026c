"""Every cluster that the environment can describe, or describes wrongly."""

import json
import os

import pytest

from estimator_accum import set_tf_config
from estimator_accum.programs import launchers
from estimator_accum.programs.cluster import Cluster
from estimator_accum.programs.launchers import read_cluster, read_cluster_of
from tests.helpers.models.launcher_environments import ALONE, RECORDED

pytestmark = pytest.mark.once
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
        pytest.param(
            "[" * 100_000,
            r"must be JSON\. .*\(values are nested too deeply\)\. Correct it, or unset",
            id="nested",
        ),
        ("[]", r"`TF_CONFIG` must be an object .*Received: \[\]\."),
        ('{"task": 1, "task": 2}', r'an object has the key "task" twice\)\. Correct'),
        (
            '{"cluster": null}',
            r'`TF_CONFIG\["cluster"\]` must be an object .*Received: none\.',
        ),
        (
            '{"task": {"type": "worker", "index": 1}}',
            r'`TF_CONFIG\["cluster"\]` must be an object .*Received: none\.',
        ),
    ],
)
def test_text_that_is_no_configuration_is_refused(text, sentence):
    with pytest.raises(ValueError, match=sentence):
        read_cluster({"TF_CONFIG": text})


@pytest.mark.parametrize(
    "cluster, sentence",
    [
        ([], r'\["cluster"\]` must be an object of task types .*Received: \[\]\.'),
        ({"ps": ["a:1"]}, r"a chief or a worker, which.*Received: ps alone\."),
        ({"leader": ["a:1"]}, r"Received: leader\. Name the task that saves chief"),
        ({"chief": ["a:1"], "master": ["b:1"]}, r"one chief.*a chief and a master\."),
        ({"worker": []}, r"an object of task types .*Received: \{\}\."),
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
def test_slurm_task_finds_its_own_address(rank, host, local_id, index):
    task = {"SLURM_PROCID": rank, "SLURMD_NODENAME": host, "SLURM_LOCALID": local_id}
    environment = _SLURM | {name: str(value) for name, value in task.items()}
    cluster = read_cluster(environment)
    assert cluster.workers == ("n10:25824", "n9:25824", "n9:25825")
    assert (cluster.name, cluster.rank) == (f"worker {index}", index)


def test_tf_config_comes_before_slurm():
    config = {"cluster": _CLUSTER, "task": {"type": "chief", "index": 0}}
    cluster = read_cluster(_SLURM | {"TF_CONFIG": json.dumps(config)})
    assert cluster.chief == "a:1"


@pytest.mark.parametrize(
    "nodes, tasks, names",
    [
        ("n[1-2]-ib", "2", None),  # fewer counts than nodes
        ("n[1-2]-ib", "1(x2)", "n1-ib n2-ib"),
        ("rack[1-2]n[1-2]", "1(x4)", "rack1n1 rack1n2 rack2n1 rack2n2"),
        ("a[08-10,7].b,c-d", "1(x4),1", "a08.b a09.b a10.b a7.b c-d"),
        ("a[001-002],b[1-2]x[3,5]", "1(x6)", "a001 a002 b1x3 b1x5 b2x3 b2x5"),
        ("n[1-2", "1(x2)", None),
        ("n1-2]", "1", None),
        ("n[1-x]", "1(x2)", None),
        ("n[]", "1", None),
        ("n1,n2", "1(y2)", None),
    ],
)
def test_nodes_of_slurm_are_spelled_out(nodes, tasks, names):
    hosts = (names or "n1 n2").split()
    environment = _SLURM | {"SLURM_STEP_NODELIST": nodes, "SLURMD_NODENAME": hosts[1]}
    environment |= {"SLURM_STEP_TASKS_PER_NODE": tasks}
    environment |= {"SLURM_STEP_NUM_TASKS": str(len(hosts))}
    if names is None:
        with pytest.raises(
            ValueError, match=r"^Slurm must .* Start the tasks with srun"
        ):
            read_cluster(environment)
        return
    cluster = read_cluster(environment)
    assert cluster.workers == tuple(f"{host}:25824" for host in hosts)
    assert cluster.task_index == 1


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURMD_NODENAME", "SLURM_PROCID"])
def test_slurm_without_a_variable_is_refused(name):
    environment = {key: value for key, value in _SLURM.items() if key != name}
    with pytest.raises(ValueError, match=rf"{name}.*Start the tasks with srun\."):
        read_cluster(environment)


def test_slurm_steps_with_near_numbers_share_no_port():
    """64 tasks on a node: 150 jobs in a row, and the first 5 steps of 20 jobs.

    512 tasks on a node: the first 2 steps of 8 jobs.
    """

    def ports(job: int, step: int, tasks: int = 64) -> set[str]:
        variables = {"SLURM_STEP_NODELIST": "n9", "SLURM_STEP_ID": str(step)}
        for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS"):
            variables[name] = str(tasks)
        return set(
            read_cluster(_SLURM | variables | {"SLURM_JOB_ID": str(job)}).workers
        )

    steps = [(job, 0) for job in range(4200, 4350)]
    assert len(set().union(*(ports(*step) for step in steps))) == 64 * len(steps)
    steps = [(job, step) for job in range(4200, 4220) for step in range(5)]
    assert len(set().union(*(ports(*step) for step in steps))) == 64 * len(steps)
    steps = [(job, step, 512) for job in range(4200, 4208) for step in range(2)]
    assert len(set().union(*(ports(*step) for step in steps))) == 512 * len(steps)


def test_slurm_with_another_number_of_tasks_is_refused():
    with pytest.raises(ValueError, match=r"Received: 4 tasks, and 3 on the nodes\."):
        read_cluster(_SLURM | {"SLURM_STEP_NUM_TASKS": "4"})


def _described(cluster: Cluster) -> str:
    """Returns the cluster as `Recorded.expected` has it."""
    if cluster.is_alone:
        return ALONE
    addresses = [*([cluster.chief] if cluster.chief else []), *cluster.workers]
    servers = ["ps", *cluster.servers] if cluster.servers else []
    return f"{cluster.name}: {' '.join([*addresses, *servers])}"


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda recorded: recorded.name)
def test_a_launchers_environment_is_read_or_refused(recorded):
    refusal = recorded.expected.partition("refused: ")[2]
    if refusal:
        with pytest.raises(ValueError, match=rf"Received: .*{refusal}|`{refusal}\["):
            read_cluster(recorded.environment)
    else:
        assert _described(read_cluster(recorded.environment)) == recorded.expected


def test_at_least_30_environments_have_a_source():
    assert len({recorded.name for recorded in RECORDED}) == len(RECORDED) >= 30
    assert all(recorded.source for recorded in RECORDED)


def test_a_script_gets_its_tf_config_from_any_launcher_in_one_call(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "")  # and unset behind the test
    assert set_tf_config().is_alone and "TF_CONFIG" not in os.environ
    for name, value in {"SM_HOSTS": '["a", "b"]', "SM_CURRENT_HOST": "b"}.items():
        monkeypatch.setenv(name, value)
    cluster = set_tf_config()
    assert (cluster.rank, cluster.num_workers) == (1, 2)
    assert json.loads(os.environ["TF_CONFIG"]) == {
        "cluster": {"worker": ["a:2222", "b:2222"]},
        "task": {"type": "worker", "index": 1},
    }


def test_tf_config_keeps_its_other_keys(monkeypatch):
    task = {"type": "worker", "index": 1, "trial": "7"}
    others = {"model_dir": "/run", "rpc_layer": "grpc", "session_master": "grpc://s:1"}
    before = {"cluster": _CLUSTER, "task": task, "environment": "cloud"} | others
    monkeypatch.setenv("TF_CONFIG", json.dumps(before))
    set_tf_config()
    assert json.loads(os.environ["TF_CONFIG"]) == before


@pytest.mark.parametrize(
    "config",
    [
        {"model_dir": "/run"},
        {"cluster": {}, "model_dir": "/run"},
        {"environment": "cloud", "task": {"type": "worker", "index": 0, "trial": "7"}},
    ],
)
def test_tf_config_without_a_cluster_stays_and_gets_the_launchers(monkeypatch, config):
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    assert set_tf_config().is_alone
    assert json.loads(os.environ["TF_CONFIG"]) == config
    assert read_cluster_of("none", {**os.environ, "SLURM_NTASKS": "4"}).is_alone
    for name, value in {"SM_HOSTS": '["a", "b"]', "SM_CURRENT_HOST": "b"}.items():
        monkeypatch.setenv(name, value)
    assert set_tf_config().rank == 1
    assert json.loads(os.environ["TF_CONFIG"]) == config | {
        "cluster": {"worker": ["a:2222", "b:2222"]},
        "task": config.get("task", {}) | {"type": "worker", "index": 1},
    }


def test_sagemakers_file_lists_the_hosts_where_no_variable_does(monkeypatch, tmp_path):
    file = tmp_path / "resourceconfig.json"
    monkeypatch.setattr(launchers, "_SAGEMAKER_FILE", file)
    file.write_text('{"current_host": "algo-2", "hosts": ["algo-1", "algo-2"]}')
    assert _described(read_cluster({})) == "worker 1: algo-1:2222 algo-2:2222"
    one = {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"}
    assert read_cluster(one).is_alone
    with pytest.raises(ValueError, match=r"one number .* OMPI_COMM_WORLD_RANK=0 of"):
        read_cluster({"OMPI_COMM_WORLD_RANK": "0"})
    file.write_text("{")
    assert read_cluster({}).is_alone


@pytest.mark.parametrize(
    "name, value, alone",
    [
        ("OMPI_COMM_WORLD_SIZE", "2", "1"),
        ("OMPI_COMM_WORLD_RANK", "0", ""),
        ("PMI_SIZE", "2", "1"),
        ("MPI_LOCALNRANKS", "2", "1"),
        ("PMIX_RANK", "0", ""),
        ("JOB_COMPLETION_INDEX", "0", ""),
        ("MV2_COMM_WORLD_SIZE", "2", "1"),
        ("JSM_NAMESPACE_SIZE", "2", "1"),
        ("WORLD_SIZE", "2", "1"),
        ("LOCAL_WORLD_SIZE", "2", ""),
        ("RANK", "3", "none"),
        ("PET_NNODES", "1:2", "1:1"),
        ("PET_NODE_RANK", "0", ""),
        ("HOROVOD_SIZE", "2", "1"),
        ("SLURM_NTASKS", "4", "1"),
        ("SLURM_PROCID", "0", ""),
        ("FLUX_JOB_SIZE", "2", "1"),
        ("ALPS_APP_PE", "0", ""),
        ("PALS_RANKID", "0", ""),
        ("PBS_NODENUM", "0", ""),
        ("DMLC_NUM_WORKER", "2", "1"),
        ("PADDLE_TRAINERS_NUM", "2", "1"),
        ("SKYPILOT_NUM_NODES", "2", "1"),
        ("VC_TASK_INDEX", "0", ""),
        ("AWS_BATCH_JOB_NUM_NODES", "2", "1"),
        ("AZUREML_NODE_COUNT", "2", "1"),
        ("PALS_SIZE", "8", "1"),
        ("SLURM_JOB_NUM_NODES", "4", "1"),
        ("NGC_ARRAY_SIZE", "2", "1"),
        ("MF_PARALLEL_NUM_NODES", "2", "1"),
        ("MLP_WORKER_NUM", "2", "1"),
        ("CROSS_SIZE", "2", "1"),
        ("TPU_WORKER_HOSTNAMES", "a.b,c.d", "localhost"),
        ("SM_HOSTS", '["algo-1", "algo-2"]', '["algo-1"]'),
        (
            "SM_RESOURCE_CONFIG",
            '{"current_host": "a", "hosts": ["a", "b"]}',
            '{"current_host": "a", "hosts": ["a"], "instance_groups": [1, 2]}',
        ),
        ("CLUSTER_SPEC", '{"worker": ["a:1", "b:1"]}', "of my own"),
    ],
)
def test_process_of_another_launcher_is_refused_unless_it_is_alone(name, value, alone):
    message = (
        rf"^A cluster must be .* Received: {name}=.* or unset {name} to train alon"
    )
    with pytest.raises(ValueError, match=message):
        read_cluster({name: value})
    assert read_cluster({name: alone}).is_alone
    config = {"cluster": _CLUSTER, "task": {"type": "chief", "index": 0}}
    assert read_cluster({name: value, "TF_CONFIG": json.dumps(config)}).num_workers == 3


@pytest.mark.parametrize(
    "variables, is_refused",
    [
        ({"OMPI_COMM_WORLD_SIZE": "4"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, False),  # with an evaluator
        ({"WORLD_SIZE": "3"}, True),
        ({"SLURM_NTASKS": "4"}, False),  # an allocation
        ({"PMI_SIZE": "4", "SLURM_STEP_NUM_TASKS": "4"}, False),  # Ray's srun
    ],
)
def test_the_only_task_of_tf_config_runs_once(variables, is_refused):
    task = {"type": "chief", "index": 0}
    config = json.dumps({"cluster": {"chief": ["a:1"]}, "task": task})
    if not is_refused:
        assert read_cluster(variables | {"TF_CONFIG": config}).name == "chief 0"
        return
    (name,) = variables
    with pytest.raises(ValueError, match=rf"Received: one task, and {name}=\d, whose"):
        read_cluster(variables | {"TF_CONFIG": config})


def test_number_of_a_process_is_never_guessed():
    task = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}
    assert read_cluster(task | {"RANK": "1"}).task_index == 1
    for rank in ({}, {"RANK": "one"}):
        with pytest.raises(ValueError, match="Received: WORLD_SIZE=2 of torchrun"):
            read_cluster(task | rank)


@pytest.mark.parametrize("launcher", launchers.LAUNCHERS, ids=lambda row: row.name)
def test_number_0_of_unknown_many_is_refused_unless_a_variable_counts_one(launcher):
    for rank in launcher.ranks:
        with pytest.raises(ValueError, match=rf"Received: {rank}=0 of "):
            read_cluster({rank: "0"})
        for size in launcher.sizes:
            assert read_cluster({rank: "0", size.replace("*", "WORKER"): "1"}).is_alone


def test_launchers_variables_in_a_slurm_step_may_name_its_tasks_and_no_more():
    task = {"PMI_SIZE": "3", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2", "RANK": "2"}
    assert read_cluster(_SLURM | task | {"SLURM_NTASKS": "8"}).num_workers == 3
    with pytest.raises(ValueError, match="OMPI_COMM_WORLD_SIZE=6 of Open MPI"):
        read_cluster(_SLURM | {"OMPI_COMM_WORLD_SIZE": "6"})
    assert read_cluster({"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"}).is_alone
