"""--micro_batch_size=auto: as many micro-batches as memory needs, the same weights."""

import pytest

from tests.helpers.models.short_run import (
    FLAGS,
    assert_same_weights,
    examples_seen,
    values,
)
from tests.helpers.processes import running

pytestmark = [pytest.mark.daily, pytest.mark.slow, pytest.mark.once]

_PROGRAM = running.PROGRAMS / "short_of_memory.py"


def test_memory_decides_and_the_evaluator_has_the_last_word(tmp_path, one_worker):
    folder = tmp_path / "output"
    flags = (f"--output_dir={folder}", "--micro_batch_size=auto", *FLAGS)
    command = (_PROGRAM, "--rows_in_memory=51", "--micro_steps=0", *flags)
    with running.cluster(command, jobs=("chief", "evaluator"), cwd=tmp_path) as tasks:
        chief, evaluator = (task.wait() for task in tasks)
    assert chief.returncode == evaluator.returncode == 0
    assert (
        "203 examples with the number of micro-batches chosen by memory" in chief.output
    )
    for change in ("1 -> 2", "2 -> 4"):
        assert f"micro-batches {change}: out of memory at update 1" in chief.output
    assert values(folder)["global_step"] == 6
    assert_same_weights(folder, one_worker)
    assert examples_seen(folder) == [203 * (n + 1) for n in range(6)]
    assert "\naccuracy  " in evaluator.output and "\naccuracy  " not in chief.output
    assert len(list((folder / "export" / "final").iterdir())) == 1
