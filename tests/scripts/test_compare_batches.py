"""compare_batches.py on a tiny BERT."""

import pathlib
import re
import shutil
import subprocess

import numpy as np
import pytest

from scripts.experiments import compare_batches
from tests.helpers.models.tiny_bert import write_bert, write_cola

pytestmark = pytest.mark.once


@pytest.mark.daily
@pytest.mark.slow
def test_the_difference_is_printed_and_judged(tmp_path, capsys, monkeypatch):
    run, trained = subprocess.run, {}

    def run_once(command, **options):
        *_, folder = (f[13:] for f in command if f.startswith("--output_dir="))
        if (name := pathlib.Path(folder).name) not in trained:
            if name == "padded":  # run in test_effective_batch.py
                assert command[-1] == "--pad_to_max_length"
                trained[name] = trained["whole"]
            else:
                trained[name] = folder
                return run(command, **options)
        if trained[name] != folder:
            shutil.copytree(trained[name], folder)
        return subprocess.CompletedProcess(command, 0)

    def compare(against, tolerance):
        folders = {"data_dir": "cola", "bert_dir": "bert", "output_dir": against}
        flags = [f"--{name}={tmp_path / folder}" for name, folder in folders.items()]
        flags += ["--updates=2", "--micro_batch_size=3", "--max_seq_length=16"]
        flags += ["--gradient_accumulation_steps=2", f"--tolerance={tolerance}"]
        flags += [f"--against={against}"]
        code = compare_batches.main(flags)
        stdout = capsys.readouterr().out
        assert ("3 x 2 --pad_to_max_length\n" in stdout) == (against == "padded")
        match = re.search(r"largest relative weight difference: (\S+)\n", stdout)
        assert 0 < float(match[1]) < 1e-5
        verdict = "above" if code else "within"
        assert stdout.endswith(f"\n{verdict} --tolerance={float(tolerance):g}\n")
        return code

    monkeypatch.setattr(compare_batches.subprocess, "run", run_once)
    write_bert(tmp_path / "bert")
    write_cola(tmp_path / "cola")
    assert compare("whole", "1e-5") == 0
    assert compare("padded", "0") == 1
    assert list(trained) == ["accumulated", "whole", "padded"]


def test_a_difference_of_rounding_alone_is_explained(capsys):
    values = {name: np.ones(2) for name in ("layer/key/bias", "layer/key/kernel")}
    theirs = {"update_step": 1, **values, "layer/key/bias/adam_m": np.ones(2)}
    ours = theirs | {"layer/key/bias/adam_m": np.zeros(2)}
    ours["layer/key/kernel"] = np.full(2, 1.5)
    assert compare_batches._compare(ours, theirs, 1.0) == 0
    slot, weight, *_ = capsys.readouterr().out.splitlines()
    assert re.match(r"adam_m +1\.00e\+00  layer/key/bias/adam_m  \(has no grad", slot)
    assert weight == "weight   5.00e-01  layer/key/kernel"
