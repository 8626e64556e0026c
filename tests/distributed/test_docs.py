"""The README of distributed/ has exactly the existing flags; manifests are valid."""

import re
import subprocess
import sys

import pytest

from distributed import launch_local
from distributed.main import PROGRAM
from estimator_accum.programs.launchers import read_cluster
from estimator_accum.programs.settings import OTHER_NAMES
from tests.helpers.processes import documents
from tests.helpers.processes.running import ROOT

pytestmark = pytest.mark.once

_FLAGS = PROGRAM.flags()
_README = (ROOT / "distributed" / "README.md").read_text()


_SLURM = (ROOT / "distributed" / "slurm.sh").read_text()


def test_table_has_every_flag_with_its_default():
    rows = dict(re.findall(r"^\| `--(\w+)` \| (.*?) \|", _README, re.MULTILINE))
    assert set(rows) == set(_FLAGS) - {"v", *OTHER_NAMES.values()}
    for name, shown in rows.items():
        default = _FLAGS[name].default
        if default is not None:
            assert shown.strip("`") == str(default).lower(), name
    flags = launch_local.make_flags()
    assert f"`--workers` ({flags['workers'].default})" in _README
    assert f"`--max_restarts` ({flags['max_restarts'].default} in a row" in _README
    assert flags["evaluator"].default is False


def test_table_has_every_file():
    named = set(re.findall(r"`(\w+\.py)`", _README))
    files = {path.name for path in (ROOT / "distributed").glob("*.py")}
    assert named == files - {"__init__.py"}


def _assert_flags_of_main(words: list[str]) -> None:
    flags = re.findall(r"--(\w+)=", " ".join(words))
    assert "output_dir" in flags
    assert all(name in _FLAGS for name in flags)


_DOES_NOT_FIT = {"containerName": "node", "operator": "In", "values": [2]}
_GPU = {
    "requests": {"cpu": 8, "memory": "32Gi"},
    "limits": {"memory": "32Gi", "nvidia.com/gpu": 1},
}


def _manifests() -> list[dict]:
    return documents.manifests()


def _task_of(container: dict, folder, program: str, **variables: str):
    """Runs a container's command, with `program` in place of `python`."""
    assert container["command"] == ["estimator-accum", "task"]
    python = folder / "python"
    python.write_text(f"#!/bin/bash\n{program}\n")
    python.chmod(0o755)
    command = [sys.executable, "-m", "estimator_accum", "task", *container["args"]]
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    options = {"env": environment | variables, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **options)


_VOLUME = {"name": str, "persistentVolumeClaim": {"claimName": str}}
_CONTAINER = {
    "name": str,
    "image": str,
    "workingDir": str,
    "volumeMounts": [{"name": str, "mountPath": str}],
}
_POD = {
    "terminationGracePeriodSeconds": int,
    "securityContext": {"runAsUser": int, "fsGroup": int},
    "volumes": [_VOLUME],
}
_ARGUMENTS = {"command": [str], "args": [str]}
_RESOURCES = {
    "requests": {"cpu": int, "memory": str},
    "limits": {"memory": str, "nvidia.com/gpu": int},
}
_OBJECT = {"apiVersion": str, "kind": str, "metadata": {"name": str}}
_RULE = {"name": str, "action": str, "onJobFailureReasons": [str]}
_ON_EXIT = {"containerName": str, "operator": str, "values": [int]}
_NODE = {
    "backoffLimit": int,
    "podFailurePolicy": {"rules": [{"action": str, "onExitCodes": _ON_EXIT}]},
    "template": {"spec": _POD | {"restartPolicy": str, "containers": [_CONTAINER]}},
}
_LABELLED = {
    "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": str}},
    "spec": _NODE,
}
_RUNTIME = {
    "mlPolicy": {"numNodes": int},
    "template": {
        "spec": {
            "failurePolicy": {"maxRestarts": int, "rules": [_RULE]},
            "replicatedJobs": [{"name": str, "template": _LABELLED}],
        }
    },
}
_TRAIN_JOB = {
    "runtimeRef": {"kind": str, "name": str},
    "trainer": {"numNodes": int, "resourcesPerNode": _RESOURCES} | _ARGUMENTS,
}
_TRAINED = _CONTAINER | _ARGUMENTS | {"resources": _RESOURCES}
_REPLICA = {
    "replicas": int,
    "restartPolicy": str,
    "template": {"spec": _POD | {"containers": [_TRAINED]}},
}
_TF_JOB = {
    "runPolicy": {"cleanPodPolicy": str, "backoffLimit": int},
    "tfReplicaSpecs": {"Chief": _REPLICA, "Worker": _REPLICA},
}


def _shape_of(value):
    """Returns a manifest with types for its scalars, and one item for a list."""
    if isinstance(value, dict):
        return {key: _shape_of(part) for key, part in value.items()}
    if isinstance(value, list):
        assert all(_shape_of(element) == _shape_of(value[0]) for element in value)
        return [_shape_of(value[0])]
    return type(value)


def test_manifests_have_the_fields_of_their_operators():
    # Those of the schemas of Kubeflow Trainer (21 August 2026) and TFJob v1.
    shapes = [_OBJECT | {"spec": spec} for spec in (_RUNTIME, _TRAIN_JOB, _TF_JOB)]
    assert [_shape_of(manifest) for manifest in _manifests()] == shapes


def test_runtime_restarts_all_tasks_but_not_after_exit_code_2():
    runtime, _, _ = _manifests()
    policy = runtime["spec"]["template"]["spec"]["failurePolicy"]
    [rule] = policy["rules"]
    assert rule["action"] == "FailJobSet" and policy["maxRestarts"] == 20
    [job] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    job = job["template"]["spec"]
    [refused] = job["podFailurePolicy"]["rules"]
    assert (refused["action"], refused["onExitCodes"]) == ("FailJob", _DOES_NOT_FIT)
    assert job["backoffLimit"] == 0
    pod = job["template"]["spec"]
    [container], [volume] = pod["containers"], pod["volumes"]
    assert pod["restartPolicy"] == "Never" and container["name"] == "node"
    assert container["volumeMounts"][0]["name"] == volume["name"]


def test_train_job_describes_its_cluster_to_the_program(tmp_path):
    runtime, job, _ = _manifests()
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    trainer = job["spec"]["trainer"]
    assert trainer["resourcesPerNode"] == _GPU
    _assert_flags_of_main(trainer["args"][2:])
    program = 'echo "$TF_CONFIG"; echo "$@"'
    with _task_of(trainer, tmp_path, program, JOB_COMPLETION_INDEX="3") as done:
        tf_config, words = done.stdout.read().splitlines()
    cluster = read_cluster({"TF_CONFIG": tf_config})
    assert cluster.num_workers == trainer["numNodes"] == 4 and cluster.rank == 3
    assert cluster.workers[1] == "digits-node-0-1.digits:2222"
    assert ["python", *words.split()] == trainer["args"][2:]


def test_tf_job_restarts_lost_tasks_but_not_after_exit_code_2(tmp_path):
    *_, job = _manifests()
    for replicas in job["spec"]["tfReplicaSpecs"].values():
        assert replicas["restartPolicy"] == "ExitCode"  # from 128 on
        pod = replicas["template"]["spec"]
        [container] = pod["containers"]
        assert container["name"] == "tensorflow"  # the operator looks for it
        assert container["resources"] == _GPU
        _assert_flags_of_main(container["args"][1:])
        assert container["volumeMounts"][0]["name"] == pod["volumes"][0]["name"]
    for code, expected in ((2, 2), (75, 138)):
        with _task_of(container, tmp_path, f"exit {code}") as done:
            assert done.wait() == expected


def test_pods_run_as_the_image_s_user_who_may_write():
    runtime, _, job = _manifests()
    [node] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    replicas = job["spec"]["tfReplicaSpecs"].values()
    pods = [node["template"]["spec"]["template"], *(r["template"] for r in replicas)]
    [user] = re.findall("(?m)^USER (.*)", (ROOT / "Dockerfile").read_text())
    for pod in pods:
        context = {"runAsUser": int(user), "fsGroup": int(user)}
        assert pod["spec"]["securityContext"] == context


def test_sbatch_script_is_bash_and_starts_the_tasks_with_srun():
    script = _SLURM
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert script.startswith("#!/bin/bash\n#SBATCH --")
    flags = ("--gres=gpu:1", "--signal=TERM@60", "--requeue", "--open-mode=append")
    for flag in flags:
        assert f"#SBATCH {flag}\n" in script
    [command] = re.findall(r"srun .*?(?=\n    code)", script, re.DOTALL)
    assert "python -m distributed.main" in command
    _assert_flags_of_main(command.split())


def test_sbatch_script_starts_again_until_the_tasks_are_done(tmp_path):
    srun = tmp_path / "srun"
    lines = "echo >> starts", '[ "$(wc -l < starts)" -ge 3 ] && exit $LAST', "exit 75"
    srun.write_text("\n".join(["#!/bin/bash", *lines]))
    srun.chmod(0o755)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    for last in ("0", "2", "143"):
        (tmp_path / "starts").unlink(missing_ok=True)
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "LAST": last}
        environment["SLURM_SUBMIT_DIR"] = str(tmp_path)
        command = ["bash", "-c", _SLURM]
        done = subprocess.run(command, env=environment, check=False)
        assert done.returncode == int(last)
        assert (tmp_path / "starts").read_text().count("\n") == 3
