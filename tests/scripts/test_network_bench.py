"""Two workers with a slow link between them, and the model's prediction."""

import csv
import os
import shutil
import subprocess
import sys

import numpy as np
import psutil
import pytest
import tensorflow as tf

from bert_finetune.checkpoint import write_checkpoint
from distributed import command_line, local_clusters
from scripts.benchmarks import network_bench
from tests.helpers import running

# Two tasks that send each other a byte per update, at the address in their TF_CONFIG.
_TASK = """
import itertools, json, os, socket, sys
config = json.loads(os.environ["TF_CONFIG"])
host, port = config["cluster"]["worker"][0].split(":")
if config["task"]["index"]:
    while (peer := socket.socket()).connect_ex((host, int(port))):
        pass
    file = open(os.devnull, "w")
else:
    peer, _ = socket.create_server((host, int(port))).accept()
    file = open(f"{sys.argv[1]}/train_metrics.csv", "w")
print("update_step", file=file)
for update in itertools.count(1):
    peer.sendall(b".")
    peer.recv(1)
    print(update, file=file, flush=True)
"""


@pytest.fixture
def networks():
    """Skips the test if networks cannot be created."""
    missing = [tool for tool in network_bench.TOOLS if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"not on PATH: {', '.join(missing)}")
    if os.geteuid() or subprocess.call(["unshare", "--net", "true"]):
        pytest.skip("networks of their own are made by root with CAP_SYS_ADMIN only")


@pytest.mark.once
def test_tasks_are_timed_with_a_fast_and_a_slow_link(networks, tmp_path, monkeypatch):
    make, secs_per_update = network_bench._make_networks, network_bench._secs_per_update
    holders = []

    def made(stack):
        holders[:] = make(stack)
        return holders

    def command_of(module, output_dir, **flags):
        assert module == "main" and set(flags) <= set(command_line.FLAGS)
        return [sys.executable, "-S", "-c", _TASK, output_dir]

    def timed(*arguments):
        assert secs_per_update(*arguments) > 0  # the link works
        show = ["tc", "qdisc", "show", "dev", "slow0"]
        enter = [network_bench._enter(holder) for holder in holders]
        one, other = (subprocess.check_output([*each, *show]) for each in enter)
        assert (b"rate 100Mbit" in one) == (b"rate 100Mbit" in other)
        return 0.05 if b"rate 100Mbit" in one else 0.02

    monkeypatch.setattr(local_clusters, "_DEADLINE_SECS", running.DEADLINE_SECS)
    monkeypatch.setattr(network_bench, "_STEPS", (1, 8))
    monkeypatch.setattr(network_bench, "_make_networks", made)
    monkeypatch.setattr(network_bench, "_secs_per_update", timed)
    monkeypatch.setattr(network_bench, "_parameter_bytes", lambda _: 250_000)
    monkeypatch.setattr(network_bench, "command_of", command_of)
    before = psutil.Process().children()
    flags = [f"--output_dir={tmp_path}", "--updates=2"]
    assert network_bench.main(flags) == 0
    assert psutil.Process().children() == before
    rows = list(csv.DictReader((tmp_path / "network.csv").read_text().splitlines()))
    assert [r["series"] for r in rows] == ["effective batch"] * 2 + ["micro-batch"] * 2
    sizes = [(row["steps"], row["micro_batch_size"]) for row in rows]
    assert sizes == [("1", "80"), ("8", "10"), ("1", "80"), ("8", "80")]
    for row, examples in zip(rows, (160, 160, 160, 1280), strict=True):
        # 250,000 bytes there and back take 0.02 s.
        rates = [float(row[name]) for name in ("fast", "slow", "predicted")]
        assert rates == pytest.approx([examples / s for s in (0.02, 0.05, 0.04)])
    assert (tmp_path / "network.png").stat().st_size > 10_000


def test_parameters_are_the_kernels_and_biases(tmp_path):
    shapes = {"a/kernel": [3, 4], "a/bias": [4], "a/kernel/momentum": [3, 4], "n": []}
    arrays = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    write_checkpoint(arrays, str(tmp_path / "model.ckpt"))
    tf.compat.v1.train.update_checkpoint_state(tmp_path, str(tmp_path / "model.ckpt"))
    assert network_bench._parameter_bytes(str(tmp_path)) == 4 * 16


@pytest.mark.once
def test_nothing_is_left_of_a_killed_measurement(networks, tmp_path, real_starts):
    with running.start(network_bench.__file__, cwd=tmp_path) as script:
        process = psutil.Process(script.process.pid)
        # two networks, two tasks
        running.wait_until(lambda: len(process.children()) >= 4, script)
        children = process.children()
        script.process.kill()
        script.process.wait()
        _, left = psutil.wait_procs(children, timeout=running.DEADLINE_SECS)
    assert not left


@pytest.mark.parametrize(
    ("user", "sentence"),
    [
        (1000, "Slow links must be made by root on Linux."),
        (0, "Received: no tc on PATH. Install iproute2"),
    ],
)
def test_who_cannot_make_networks_is_told_why(user, sentence, refusal, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else tool)
    assert sentence in refusal(network_bench.main)
