"""`--strategy`: the weights of one process, real clusters, lost tasks."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest
import running
from tiny_bert import flags_of, metrics, variables

from bert_finetune.settings import Settings
from estimator_accum.batches import AUTO

pytestmark = pytest.mark.slow

_MACHINE = pathlib.Path(__file__).with_name("other_machine.py")
_PLAN = "effective batch 16 = 4 examples x 2 micro-steps x 2 replicas; 13 micro-steps"


@pytest.fixture(scope="module")
def in_cluster(of_16) -> Settings:
    """Saved every 3 micro-steps, which is every 2 updates of 2."""
    return dataclasses.replace(
        of_16,
        strategy="multi_worker",
        save_checkpoints_steps=3,
        watchdog_secs=10**6,  # time is for no task of a test
    )


@pytest.fixture(scope="module")
def pair(in_cluster, tmp_path_factory):
    """Output folder and stderr of two tasks that trained to the end."""
    folder = tmp_path_factory.mktemp("pair") / "output"
    changes = {"do_eval": True, "do_predict": True, "output_dir": str(folder)}
    with _two_tasks(in_cluster, **changes) as tasks:
        return folder, _ends(tasks)


def _two_tasks(settings, machines=((), ()), **changes):
    flags = flags_of(settings, **changes)
    commands = [(_MACHINE, *machine, *flags) for machine in machines]
    return running.cluster(*commands, jobs=("chief", "worker"))


def _ends(tasks) -> str:
    done = [task.wait() for task in tasks]
    assert [each.returncode for each in done] == [0, 0]
    return "".join(each.stderr for each in done)


def _assert_close(folder, one):
    ours, theirs = variables(folder), variables(one)
    assert ours["update_step"] == theirs["update_step"] == 7
    names = theirs.keys() - {"global_step"}
    assert len(names) > 30
    for name in names:
        np.testing.assert_allclose(ours[name], theirs[name], atol=1e-5, err_msg=name)


def test_two_processes_have_the_weights_of_one_and_the_chief_does_the_rest(
    pair, in_threes
):
    folder, output = pair
    assert output.count(_PLAN) == 1
    _assert_close(folder, in_threes)
    examples = [row["examples"] for row in metrics(folder)]
    assert examples == ["16", "32", "48", "64", "80", "96", "100"]
    assert "update_step = 7" in (folder / "eval_results.txt").read_text()
    assert len((folder / "CoLA.tsv").read_text().splitlines()) == 11


@pytest.mark.once
def test_tasks_of_different_memory_have_the_weights_of_one_process(
    in_cluster, tmp_path, in_threes
):
    """Shares of 8: in 2 micro-batches where 5 examples fit, in 4 where 3 do."""
    machines = ["examples_that_fit=5"], ["examples_that_fit=3"]
    changes = {"train_batch_size": AUTO, "output_dir": str(tmp_path)}
    with _two_tasks(in_cluster, machines, **changes) as tasks:
        assert "micro-batches 2 -> 4: out of" in _ends(tasks)
    _assert_close(tmp_path, in_threes)
    assert variables(tmp_path)["global_step"] == 7
    counts = [
        json.loads((tmp_path / f"micro_batches-{task}-0.json").read_text())
        for task in ("chief", "worker")
    ]
    assert counts == [{"micro_batches": 2}, {"micro_batches": 4}]


@pytest.mark.once
def test_task_that_lost_the_other_ends_itself_and_both_go_on_bit_for_bit(
    in_cluster, tmp_path, pair
):
    settings = dataclasses.replace(in_cluster, output_dir=str(tmp_path / "output"))
    folder, late = tmp_path / "output", tmp_path / "late"
    machines = [f"late_when={late}"], ["dies_after=10"]
    with _two_tasks(settings, machines) as (chief, worker):
        assert worker.wait().returncode == -9
        late.touch()
        assert chief.wait().returncode == 75
    saved = {int(path.stem.partition("-")[2]) for path in folder.glob("*.index")}
    assert saved == {0, 4, 8}
    with _two_tasks(settings) as tasks:
        assert "going on after micro-step 8" in _ends(tasks)
    ours, theirs = variables(folder), variables(pair[0])
    assert ours.keys() == theirs.keys() and ours["update_step"] == 7
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)


@pytest.mark.once
def test_mirrored_over_two_cpus_has_the_weights_of_one(of_16, tmp_path, in_threes):
    flags = flags_of(of_16, strategy="mirrored", output_dir=str(tmp_path))
    done = running.run(_MACHINE, "logical_cpus=2", *flags)
    assert done.returncode == 0
    assert _PLAN in done.stderr
    _assert_close(tmp_path, in_threes)
