"""Ray Train's workers: a lost one costs no weight a bit; a stand-in for Ray's reports.

Ray's own clocks end it at its start on a machine that is busy with other work, so that
scripts/release_check runs the tests that start Ray, and .ci/run the others.
"""

import importlib
import importlib.util
import json
import re
import sys
import types

import numpy as np
import pytest
import tensorflow as tf

import distributed
from distributed import ray_train
from tests.helpers.models.short_run import FLAGS, examples_seen, values
from tests.helpers.processes import programs, running

pytestmark = pytest.mark.once


def _flags(folder, updates: int, save_updates: int) -> list[str]:
    steps = [f"--train_updates={updates}", f"--save_checkpoints_updates={save_updates}"]
    return [*FLAGS, f"--output_dir={folder}", "--micro_batch_size=51", *steps]


def _refusal(capsys, *arguments: str) -> str:
    """Returns the sentence with which a command line is refused."""
    with pytest.raises(SystemExit) as ended:
        sys.exit(ray_train.main([*arguments]))
    sentence = capsys.readouterr().err
    assert ended.value.code == 2 and sentence.count("\n") == 1
    return sentence


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--num_workers=0", "distributed.main"], "must be an integer >= 1. Received:"),
        (["distributed.other"], "must be one of "),
        (["distributed.main", "--train_update=2"], "Did you mean --train_updates?"),
        (["distributed.main", "--effective_batch_size=1"], "for each micro-step"),
        (
            ["distributed.main", "--strategy=parameter_server"],
            "`--strategy` must be multi_worker under Ray",
        ),
        (["housing_example.main", "--strategy=none"], "Received: none. Leave it out."),
        (["bert_finetune.run_classifier"], "`--task_name`"),
    ],
)
def test_flags_that_do_not_fit_start_nothing(capsys, arguments, said):
    assert said in _refusal(capsys, *arguments)


def test_without_ray_one_sentence_names_the_extra(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    said = _refusal(capsys, "distributed.main", f"--output_dir={tmp_path / 'new'}")
    assert "The package ray must be installed." in said
    assert "pip install 'estimator-accum[ray]'." in said
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "num_workers, said",
    [
        (0, "an integer >= 1, or the least and the largest one. Received: 0."),
        ((3, 2), "Received: (3, 2)."),
        ((2, 7), "for each micro-step"),  # 6 examples an update are too few for 7
    ],
)
def test_all_numbers_of_workers_must_fit(num_workers, said):
    scaling = types.SimpleNamespace(num_workers=num_workers)
    flags = ["--effective_batch_size=6"]
    with pytest.raises(ValueError, match=re.escape(said)):
        ray_train.make_trainer("distributed.main", flags, scaling)


@pytest.mark.parametrize(
    "files, flags, said",
    [
        (
            {},
            ["--data_dir=nowhere"],
            "`--data_dir` must be a folder. Received: nowhere",
        ),
        (
            {"run_settings.json": '{"seed": 2}'},
            [],
            "`--output_dir` must be new or hold a run with the same settings.",
        ),
    ],
)
def test_files_that_do_not_fit_start_no_worker(
    capsys, tmp_path, reports, files, flags, said
):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    folder = f"--output_dir={tmp_path}"
    assert said in _refusal(capsys, "distributed.main", folder, *flags)
    assert {path.name for path in tmp_path.iterdir()} == {*files}


def test_help_of_a_program_is_its_own(capsys):
    assert ray_train.main(["distributed.main", "--help"]) == 0
    assert "usage: python -m distributed.main" in capsys.readouterr().out


def test_questions_to_a_program_train_nothing(capsys, tmp_path):
    folder = tmp_path / "new"
    flags = ["distributed.main", f"--output_dir={folder}", "--print_config"]
    assert ray_train.main(flags) == 0
    assert '"strategy": "multi_worker"' in capsys.readouterr().out
    assert ray_train.main(["distributed.main", "--version"]) == 0
    assert "estimator-accum 1" in capsys.readouterr().out
    assert not folder.exists()


@pytest.fixture
def reports(monkeypatch):
    """Metrics, and update of the checkpoint, of each report to a stand-in for Ray."""
    received = []
    config = type("TensorflowConfig", (), {"backend_cls": object})
    train = types.SimpleNamespace(
        report=lambda metrics, checkpoint=None: received.append((metrics, checkpoint)),
        get_context=lambda: types.SimpleNamespace(get_world_rank=lambda: 0),
        Checkpoint=types.SimpleNamespace(
            from_directory=lambda folder: values(folder)["update_step"]
        ),
        tensorflow=types.SimpleNamespace(TensorflowConfig=config),
    )
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(train=train))
    monkeypatch.setitem(sys.modules, "ray.train", train)
    monkeypatch.setitem(sys.modules, "ray.train.tensorflow", train.tensorflow)
    yield received
    sys.modules.pop("distributed.ray_worker", None)
    vars(distributed).pop("ray_worker", None)


@pytest.mark.slow
def test_each_checkpoint_is_reported_once_with_the_metrics_of_its_update(
    tmp_path, reports
):
    worker = importlib.import_module("distributed.ray_worker")
    config = {"program": "distributed.main", "arguments": _flags(tmp_path, 6, 3)}
    worker.train_program(config)
    assert [update for _, update in reports] == [3, 6]
    assert [metrics["update_step"] for metrics, _ in reports] == [3, 6]
    assert [metrics["examples"] for metrics, _ in reports] == [3 * 203, 6 * 203]
    metrics = [set(metrics) for metrics, _ in reports]
    assert "loss" in metrics[0] and "eval_accuracy" in metrics[1] - metrics[0]
    worker.train_program(config)  # it is trained already: its last report was lost
    assert reports[2:] == reports[1:2]


def test_the_first_models_last_checkpoint_is_reported_with_its_own_metrics(
    tmp_path, reports
):
    worker = importlib.import_module("distributed.ray_worker")
    assert worker._last_checkpoint(tmp_path) is None
    for name in "with", "without", "without/older":
        folder = tmp_path / name
        folder.mkdir()
        (folder / "train_metrics.csv").touch()
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            tf.compat.v1.train.create_global_step()
            session.run(tf.compat.v1.global_variables_initializer())
            tf.compat.v1.train.Saver().save(session, str(folder / "model.ckpt"), 0)
    path = worker._last_checkpoint(tmp_path)
    assert path == str(tmp_path / "with" / "model.ckpt-0")
    assert worker._evaluated(tmp_path, path) == {}
    results, text = tmp_path / "eval_results.txt", "accuracy = 0.5\nglobal_step = "
    results.write_text(f"{text}0\n")
    expected = {"eval_accuracy": 0.5, "eval_global_step": 0.0}
    assert worker._evaluated(tmp_path, path) == expected
    results.write_text(f"{text}1\n")
    assert worker._evaluated(tmp_path, path) == {}
    assert worker._evaluated(tmp_path, None)["eval_accuracy"] == 0.5  # evaluated alone


def test_a_session_without_a_known_saver_is_refused(reports):
    worker = importlib.import_module("distributed.ray_worker")
    sentence = "Received: an empty collection. Add the Scaffold's saver"
    with tf.Graph().as_default(), pytest.raises(ValueError, match=sentence):
        worker.RayReport().after_create_session(None, None)


@pytest.mark.slow
def test_killed_workers_restart_and_get_the_same_bits(tmp_path, request):
    """For many kills: --ray-kills=10, of which the second one is a SIGTERM."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs Ray: pip install 'estimator-accum[ray]'")
    folder, quiet, deaths = (tmp_path / name for name in ("ray", "quiet", "deaths"))
    deaths.mkdir()
    kills = request.config.getoption("--ray-kills")
    with programs.real_starts():
        launcher = ("-m", "distributed.launch_local", "--workers=2")
        assert running.run(*launcher, *_flags(quiet, 40, 10)).returncode == 0
        done = running.run(
            running.PROGRAMS / "ray_program.py",
            *(deaths, kills, "--num_workers=2", f"--max_failures={kills}"),
            *("distributed.main", *_flags(folder, 40, 10)),
            RAY_AUTH_MODE="disabled",
        )
    assert done.returncode == 0
    assert len(list(deaths.iterdir())) == kills
    assert "resuming after update 10" in done.output
    assert kills == 1 or "saved at update 1" in done.output  # after the SIGTERM
    ours, theirs = values(folder), values(quiet)
    assert ours.keys() == theirs.keys() and ours["update_step"] == 40
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)
    assert examples_seen(folder) == examples_seen(quiet)
    [checkpoint] = re.findall(r"(?m)^checkpoint: (.*)", done.stdout)
    assert values(checkpoint)["update_step"] == 40


@pytest.mark.slow
def test_a_model_fn_of_ones_own_trains_through_a_loss(tmp_path):
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs Ray: pip install 'estimator-accum[ray]'")
    program = running.PROGRAMS / "ray_model_fn.py"
    quiet = tmp_path / "quiet"
    quiet.mkdir()
    (quiet / "death").touch()
    results = []
    with programs.real_starts():
        for folder in tmp_path, quiet:
            done = running.run(program, folder, RAY_AUTH_MODE="disabled")
            assert done.returncode == 0
            results.append(json.loads(done.stdout.splitlines()[-1]))
    assert (tmp_path / "death").exists()
    ours, theirs = (values(folder / "run") for folder in (tmp_path, quiet))
    assert ours.keys() == theirs.keys() and ours["update_step"] == 6
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)
    for result in results:
        assert values(result["path"])["update_step"] == 6
