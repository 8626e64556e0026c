"""Updates per second of the housing example, whose time is almost all `session.run`."""

import pathlib
import statistics
import tempfile

from scripts.benchmarks.script_runs import run, update_secs
from scripts.benchmarks.table import Row, make_rows

_MICRO_BATCH_SIZE = 59


def housing(steps: int, updates: int, rounds: int) -> list[Row]:
    """Compares micro-batches of 59 x `steps` with the same batch at once.

    Args:
        steps: K [micro-steps per update].
        updates: Updates per run; the first fifth is not timed.
        rounds: Number of runs of each, one after the other.
    """
    values = {}
    names = {
        "without_accumulation": f"{_MICRO_BATCH_SIZE * steps} x 1",
        "with_accumulation": f"{_MICRO_BATCH_SIZE} x {steps}",
    }
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            flags = {
                "output_dir": folder,
                "train_updates": updates,
                "train_batch_size": _MICRO_BATCH_SIZE,
                "gradient_accumulation_steps": steps,
            }
            flags = [f"--{name}={value}" for name, value in flags.items()]
            run(["-m", "housing_example.main", *flags])
            for name, label in names.items():
                timed = update_secs(pathlib.Path(folder) / name)
                # The median ignores the updates that wait for evaluations and saves.
                secs = statistics.median(secs for _, secs in timed)
                values.setdefault(label, []).append(1 / secs)
    setting = f"effective batch {_MICRO_BATCH_SIZE * steps}"
    reference = names["without_accumulation"]
    return make_rows("housing", setting, "updates a second", values, reference)
