"""scripts/micro_step_cost.py on a tiny encoder."""

import pathlib
import re
import subprocess
import sys

import pytest

_SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "micro_step_cost.py"
_TINY = {
    "hidden_size": 64,
    "num_layers": 1,
    "vocab_size": 50,
    "micro_batch_size": 2,
    "tokens": 4,
    "rounds": 3,
}


def _run(**flags):
    command = [sys.executable, str(_SCRIPT)]
    command += [f"--{name}={value}" for name, value in (_TINY | flags).items()]
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    ("largest_ratio", "code"),
    [(1000, 0), pytest.param(0.001, 1, marks=pytest.mark.once)],
)
def test_the_ratios_are_printed_and_held_to_their_bound(largest_ratio, code):
    done = _run(largest_ratio=largest_ratio)
    assert done.returncode == code, done.stderr
    ratios = re.findall(
        r"^(\S+) +(\d\.\d{3}) of a micro-step", done.stdout, re.MULTILINE
    )
    assert [name for name, _ in ratios] == ['on_nonfinite="raise"', "noise_scale=True"]
    assert all(0.1 < float(ratio) < 10 for _, ratio in ratios)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"rounds": 0}, r"--rounds must be an integer >= 1\. Received: 0\."),
        (
            {"hidden_size": 100},
            r"--hidden_size must be a multiple of 64.*Received: 100",
        ),
    ],
)
def test_sizes_are_checked(flags, sentence):
    done = _run(**flags)
    assert done.returncode == 2
    assert re.search(sentence, done.stderr)
