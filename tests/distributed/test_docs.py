"""The README of distributed/ has exactly the existing flags; manifests are valid."""

import re
import subprocess

import pytest
import yaml

from distributed import launch_local
from distributed.main import PROGRAM
from estimator_accum.programs.settings import OTHER_NAMES
from tests.helpers.processes import documents
from tests.helpers.processes.running import ROOT

pytestmark = pytest.mark.once

_FLAGS = PROGRAM.flags()
_README = (ROOT / "distributed" / "README.md").read_text()


def _block(language: str) -> str:
    [block] = documents.blocks(documents.PAGES["clusters"], language)
    return block


def test_table_has_every_flag_with_its_default():
    rows = dict(re.findall(r"^\| `--(\w+)` \| (.*?) \|", _README, re.MULTILINE))
    assert set(rows) == set(_FLAGS) - {"v", *OTHER_NAMES.values()}
    for name, shown in rows.items():
        default = _FLAGS[name].default
        if default is not None:
            assert shown.strip("`") == str(default).lower(), name
    own = launch_local.make_flags()
    assert f"`--workers` ({own['workers'].default})" in _README
    assert f"`--max_restarts` ({own['max_restarts'].default} in a row" in _README
    assert own["evaluator"].default is False


def test_table_has_every_file():
    named = set(re.findall(r"`(\w+\.py)`", _README))
    files = {path.name for path in (ROOT / "distributed").glob("*.py")}
    assert named == files - {"__init__.py"}


def _assert_flags_of_main(words: list[str]) -> None:
    flags = re.findall(r"--(\w+)=", " ".join(words))
    assert "output_dir" in flags
    assert all(name in _FLAGS for name in flags)


def test_kubernetes_manifest_is_a_job_of_one_program():
    job = yaml.safe_load(_block("yaml"))
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "TFJob")
    replicas = job["spec"]["tfReplicaSpecs"]
    assert set(replicas) == {"Chief", "Worker"}
    for each in replicas.values():
        # Tasks that wait for a lost one end with 75, and must be started again.
        assert each["restartPolicy"] == "OnFailure" and each["replicas"] >= 1
        pod = each["template"]["spec"]
        [container] = pod["containers"]
        assert container["name"] == "tensorflow"  # the operator looks for it
        assert container["command"][:3] == ["python", "-m", "distributed.main"]
        _assert_flags_of_main(container["command"])
        [mount], [volume] = container["volumeMounts"], pod["volumes"]
        assert mount["name"] == volume["name"]


def test_sbatch_script_is_bash_and_starts_the_tasks_with_srun():
    script = _block("bash")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert script.startswith("#!/bin/bash\n#SBATCH --")
    [command] = re.findall(r"srun .*?(?=\n    code)", script, re.DOTALL)
    assert "python -m distributed.main" in command
    _assert_flags_of_main(command.split())


def test_sbatch_script_starts_again_until_the_tasks_are_done(tmp_path):
    srun = tmp_path / "srun"
    lines = "echo >> starts", '[ "$(wc -l < starts)" -ge 3 ] && exit $LAST', "exit 75"
    srun.write_text("\n".join(["#!/bin/bash", *lines]))
    srun.chmod(0o755)
    for last in ("0", "2"):
        (tmp_path / "starts").unlink(missing_ok=True)
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "LAST": last}
        environment["SLURM_SUBMIT_DIR"] = str(tmp_path)
        command = ["bash", "-c", _block("bash")]
        done = subprocess.run(command, env=environment, check=False)
        assert done.returncode == int(last)
        assert (tmp_path / "starts").read_text().count("\n") == 3
