"""One task alone."""

import json

import numpy as np
import pytest
import tensorflow as tf

from distributed import jobs
from distributed.jobs import traffic_text
from estimator_accum.programs.batches import Batches
from estimator_accum.programs.cluster import Cluster
from estimator_accum.programs.inputs import Inputs
from estimator_accum.programs.strategies import count_replicas
from estimator_accum.programs.watchdog import LostTaskError
from tests.helpers.models import short_run
from tests.helpers.processes import running


def _refused(run_main, *flags) -> str:
    code, output = run_main(*flags)
    assert code == 2
    assert output.startswith("python -m distributed.main: ") and output.count("\n") == 1
    return output


@pytest.mark.parametrize(
    "flag, sentence",
    [
        ("--sed=1", "Received: --sed. Did you mean --seed?"),
        ("--data_dir=nowhere", "`--data_dir` must be a folder. Received: nowhere."),
    ],
)
def test_flag_that_does_not_fit_is_refused_in_one_sentence(run_main, flag, sentence):
    assert sentence in _refused(run_main, flag)


def test_malformed_cluster_is_refused_in_one_sentence(run_main, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"ps": ["a:1"]}}))
    assert '`TF_CONFIG["cluster"]` must be' in _refused(run_main)


def test_task_alone_learns_goes_on_and_exports(
    tmp_path, run_main, real_starts, every_line
):
    output_dir = tmp_path / "output"
    flags = [f"--output_dir={output_dir}", "--train_updates=60", "--learning_rate=0.2"]
    flags.append("--micro_batch_size=100")
    done = running.run("-m", "distributed.main", *flags)
    assert done.returncode == 0
    sizes = "effective batch 200 = 100 examples x 2 micro-steps x 1 replica; "
    assert sizes in done.output
    lines = (output_dir / "eval_results.txt").read_text().splitlines()
    results = dict(line.split(" = ") for line in lines)
    assert float(results["accuracy"]) > 0.8
    assert results["global_step"] == "120"
    table = done.stdout.splitlines()
    # Only some of TensorFlow's allocators count the memory of the model.
    table = [line for line in table if not line.startswith("peak of the model")][-12:]
    assert table[1].split() == ["accuracy", f"{float(results['accuracy']):.4f}"]
    shown = [line.partition("  ")[0] for line in table]
    assert shown[2:7] == [
        *(
            "loss",
            "updates",
            "examples per second of training",
            "peak of the process",
            "disk used",
        )
    ]
    assert shown[8:] == ["metrics", "plot", "export", "TensorBoard"]
    rows = (output_dir / "train_metrics.csv").read_text().splitlines()
    assert len(rows) == 61
    assert rows[-1].startswith("60,120,12000,")
    [export] = (output_dir / "export" / "final").iterdir()
    model = tf.saved_model.load(str(export)).signatures["serving_default"]
    classes = model(image=tf.zeros([3, 28, 28], tf.uint8))["class"]
    assert classes.shape == [3]

    before = short_run.values(output_dir)
    code, output = run_main(*flags)
    assert code == 0 and "is trained already" in output
    assert "evaluation: batch 1 of 1, " in output
    after = short_run.values(output_dir)
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value)


@pytest.mark.parametrize(
    ("steps", "replicas", "text"),
    [
        (8, 2, "K = 8: 2 replicas sent their gradients once per update, not 8 times."),
        (8, 1, None),
        (1, 2, None),
    ],
)
def test_the_table_of_a_cluster_ends_with_the_reductions_that_k_saved(
    steps, replicas, text
):
    assert traffic_text(Batches(160, steps, replicas)) == text


@pytest.mark.once
def test_a_task_has_a_replica_on_each_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [kind] * 2)
    settings = short_run.short_settings(tmp_path)
    cluster = Cluster(workers=("a:1", "b:1"), task_type="worker")
    job = jobs.prepare(Inputs(settings, cluster, None, None, "checksum"))
    assert job.batches.num_replicas == count_replicas("multi_worker", cluster) == 4


@pytest.mark.once
def test_run_goes_on_with_other_micro_batches(tmp_path, run_main, one_worker):
    assert not list(one_worker.glob("*.log"))
    folder = tmp_path / "output"
    flags = [f"--output_dir={folder}", "--save_checkpoints_updates=3", "--log_examples"]
    flags += short_run.FLAGS
    code, _ = run_main(*flags, "--micro_batch_size=51")
    assert code == 0
    # As if it had been killed after update 3.
    (folder / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-12"\n')
    code, output = run_main(*flags, "--micro_batch_size=102")
    assert code == 0 and "resuming after update 3" in output
    # The examples of each micro-step; those from 13 on are logged twice.
    lines = (folder / "examples-0.log").read_text().splitlines()
    assert [int(line.split()[0]) for line in lines] == [*range(1, 25), *range(13, 19)]
    numbers = [int(n) for line in lines[:12] + lines[24:] for n in line.split()[1:]]
    assert numbers == list(range(6 * 203))
    assert short_run.values(folder)["global_step"] == 12 + 3 * 2
    short_run.assert_same_weights(folder, one_worker)


@pytest.mark.once
def test_a_finished_run_trains_on_to_the_weights_of_the_longer_one(
    tmp_path, run_main, one_worker
):
    flags = [f"--output_dir={tmp_path / 'output'}", *short_run.FLAGS]
    assert run_main(*flags, "--train_updates=4")[0] == 0
    sentence = "holds a run with --seed=0, not 1. Use another"
    assert sentence in _refused(run_main, *flags, "--seed=1")
    code, output = run_main(*flags)
    assert code == 0 and "training on after update 4: the run, and a" in output
    ours, expected = short_run.values(tmp_path / "output"), short_run.values(one_worker)
    for name, value in expected.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)


@pytest.mark.parametrize(
    "error, code, last",
    [
        (
            LostTaskError("Start all\ntasks again."),
            75,
            "python -m distributed.main: Start all",
        ),
        (OSError("disk full"), 1, "OSError: disk full"),
    ],
)
def test_error_ends_a_task_at_once(tmp_path, run_main, monkeypatch, error, code, last):
    """TensorFlow's threads would keep the process alive."""

    def execute(job):
        raise error

    monkeypatch.setattr(jobs, "execute", execute)
    status, output = run_main(f"--output_dir={tmp_path / 'output'}")
    assert status == code and output.splitlines()[-1].startswith(last)
