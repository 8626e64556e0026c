"""The bytes of an update, measured in a small run."""

import re

import pytest

from scripts.benchmarks import network_bytes
from tests.helpers import running

# With a `preexec_fn` a program is forked from this process, and so inherits its
# network: see programs.py.
_IN_ITS_NETWORK = """
import functools, subprocess, sys
subprocess.Popen = functools.partial(subprocess.Popen, preexec_fn=int)
from scripts.benchmarks import network_bytes
measure, sizes = network_bytes._bytes_per_update, {}
def once(flags, run, idle):  # whatever the micro-batch, K=1 sends the same
    if run.gradient_accumulation_steps not in sizes:
        sizes[run.gradient_accumulation_steps] = measure(flags, run, idle)
    return sizes[run.gradient_accumulation_steps]
network_bytes._bytes_per_update = once
sys.exit(network_bytes.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.once
def test_eight_micro_steps_send_at_most_1_1_times_the_bytes_of_one():
    # In a new process, because it moves to another network.
    flags = ["--updates=20", "--effective_batch_size=16"]
    result = running.run("-c", _IN_ITS_NETWORK, *flags)
    print(result.stdout, result.stderr)
    if result.stdout.startswith("shared"):
        pytest.skip("no network namespace here: other tests send over this loopback")
    assert result.returncode == 0
    rows = re.findall(r"^(.+?) +([\d,]+) +([\d.]+)$", result.stdout, re.MULTILINE)
    assert [row[0] for row in rows] == ["K=1", "K=8", "8 reductions"]
    sizes = [int(row[1].replace(",", "")) for row in rows]
    # A ring of two sends the parameters twice; idle traffic is subtracted.
    assert sizes[0] > 1.9 * 4 * 27_000
    assert sizes[1] / sizes[0] <= 1.1
    assert abs(sizes[2] - 8 * sizes[0]) <= 8


def test_more_bytes_than_allowed_is_exit_code_1(monkeypatch, capsys):
    sizes = iter([1000.0, 1200.0, 1000.0])
    monkeypatch.setattr(network_bytes, "enter_own_network", lambda: True)
    monkeypatch.setattr(network_bytes, "_IDLE_SECS", 0.01)
    monkeypatch.setattr(network_bytes, "_bytes_per_update", lambda *_: next(sizes))
    assert network_bytes.main([]) == 1
    rows = [line.split()[-2:] for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows == [["1,000", "1.00"], ["1,200", "1.20"], ["8,000", "8.00"]]
