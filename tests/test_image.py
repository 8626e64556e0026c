"""The Dockerfile, as far as it can be checked without Docker."""

import json
import pathlib
import shutil
import subprocess
import sys

import pytest

from estimator_accum import __version__
from estimator_accum.__main__ import main as command
from tests.helpers.processes import documents, pages, running
from tests.helpers.processes.running import ROOT

pytestmark = pytest.mark.once
_LINES = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
_STEPS = [line.split(maxsplit=1) for line in _LINES if line and line[0] != "#"]
_COPIED = [
    source for what, words in _STEPS if what == "COPY" for source in words.split()[:-1]
]


def _containers() -> list[dict]:
    """Returns the containers of the manifests, those of the TFJob last."""
    runtime, job, tf_job = documents.manifests()
    [node] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    [container] = node["template"]["spec"]["template"]["spec"]["containers"]
    replicas = tf_job["spec"]["tfReplicaSpecs"].values()
    return [
        container | job["spec"]["trainer"],
        *(replica["template"]["spec"]["containers"][0] for replica in replicas),
    ]


def test_what_is_copied_exists_and_is_sent_to_docker():
    ignored, *sent = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert ignored == "*"
    assert [f"!{path}" for path in _COPIED if not (ROOT / path).exists()] == []
    assert {f"!{path}" for path in _COPIED} == {path for path in sent if "!" in path}


def test_manifest_names_the_image_that_the_page_builds():
    commands = documents.commands(documents.PAGES["clusters"])
    (build,) = [words for words in commands if words[:2] == ["docker", "build"]]
    (push,) = [words for words in commands if words[:2] == ["docker", "push"]]
    image = build[2].removeprefix("--tag=")
    assert build[3:] == ["."] and push[2] == image
    assert {container["image"] for container in _containers()} == {image}
    assert image.endswith(f"/estimator-accum:{__version__}")


def test_command_of_the_containers_is_accepted_by_the_program():
    (folder,) = [words for what, words in _STEPS if what == "WORKDIR"]
    for container in _containers():
        assert container["workingDir"] == folder and "distributed" in _COPIED
        _, words = " ".join(container["args"]).split("python -m distributed.main ")
        done = running.run("-m", "distributed.main", *words.split(), "--print_config")
        assert done.returncode == 0, done.output
        assert json.loads(done.stdout)["flags"]["data_dir"] == "/shared/mnist"


def test_entry_point_is_the_command(monkeypatch, capsys):
    (entry,) = [words for what, words in _STEPS if what == "ENTRYPOINT"]
    assert json.loads(entry) == ["estimator-accum"]
    monkeypatch.setattr(sys, "argv", ["estimator-accum", "--version"])
    assert command() == 0
    assert capsys.readouterr().out.startswith("estimator-accum ")


def test_programs_run_as_a_user_without_rights():
    steps = [what for what, _ in _STEPS]
    (user,) = [words for what, words in _STEPS if what == "USER"]
    line = f"RUN useradd --create-home --uid={user} trainer"
    assert user.isdecimal() and user != "0" and line in _LINES
    assert steps[-1] == "ENTRYPOINT" and steps[-2] == "USER"


def test_pip_leaves_the_image_s_tensorflow_alone(tmp_path):
    assert ["FROM", "tensorflow/tensorflow:${TENSORFLOW}-gpu"] in _STEPS
    (version,) = [w.split("=")[1] for _, w in _STEPS if w.startswith("TENSORFLOW=")]
    (line,) = [words for what, words in _STEPS if what == "RUN" and "pip" in words]
    pages.write_wheels(tmp_path)
    needs = ("numpy", "wrapt", "absl-py", "tensorflow-estimator<2.16,>=2.15.0")
    pages.write_wheel(tmp_path, "tensorflow", version, *needs)
    python = pages.make_environment(tmp_path / "environment")
    environment = pages.pip_variables(tmp_path)

    source = tmp_path / "image"  # as it is when pip runs
    source.mkdir()
    for what, words in _STEPS[: _STEPS.index(["RUN", line])]:
        for name in words.split()[:-1] if what == "COPY" else ():
            if (ROOT / name).is_dir():
                running.copy_tree(ROOT / name, source / name)
            else:
                shutil.copy(ROOT / name, source / name)

    def pip(*words) -> str:
        command = [sys.executable, "-m", "pip", f"--python={python}", *words]
        return subprocess.check_output(command, cwd=source, env=environment, text=True)

    pip("install", f"tensorflow=={version}")
    words = _arguments_of_pip(line, {})
    report = json.loads(pip(*words, "--quiet", "--dry-run", "--report=-"))
    names = {item["metadata"]["name"] for item in report["install"]}
    assert {"estimator-accum", "tokenizers", "matplotlib"} <= names
    assert not any(name.startswith(("tensorflow", "tf_keras")) for name in names)
    assert _arguments_of_pip(line, {"TF_KERAS": "2.20.1"}) == [
        *words,
        "tf_keras==2.20.1",
    ]


def _arguments_of_pip(line: str, variables: dict[str, str]) -> list[str]:
    """Returns the arguments that the image's shell gives to `python -m pip`."""
    script = f"python() {{ printf '%s\\n' \"$@\"; }}; {line}"
    said = subprocess.check_output(["sh", "-c", script], env=variables, text=True)
    return said.splitlines()[2:]


def test_the_dockerfile_keeps_the_linter_s_rules():
    hadolint = pathlib.Path(sys.executable).parent / "hadolint"
    if not hadolint.exists():
        pytest.skip("hadolint is not installed")
    done = subprocess.run(
        [hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")
