"""scripts/experiments/one_example.py: a real limit, one example, one update."""

import json
import subprocess

import pytest

from scripts.experiments import one_example


@pytest.mark.slow
@pytest.mark.once
def test_recomputed_layers_train_where_one_example_does_not_fit(
    tmp_path, capsys, monkeypatch
):
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 512}
    monkeypatch.setattr(one_example, "_ENCODER", one_example._ENCODER | sizes)
    flags = ["--examples=1", "--updates=1", "--limit_mb=52"]
    flags.append(f"--output_dir={tmp_path / 'out'}")
    assert one_example.main(flags) == 0
    output = capsys.readouterr().out
    assert (
        "--recompute=none: exit code 2\n    One example must fit in memory." in output
    )
    assert (
        '--recompute=auto: exit code 0\n    {"micro_batches": 1, "recompute": t'
        in output
    )


@pytest.mark.parametrize(
    ("refused", "recompute", "difference"),
    [
        ("", True, 0.0),
        ("One example must fit in memory", False, 0.0),
        ("One example must fit in memory", True, 1e-3),
        ("One example must fit in memory", None, 0.0),  # no plan: no limit was met
    ],
)
def test_another_end_of_a_run_is_exit_code_1(
    refused, recompute, difference, tmp_path, monkeypatch
):
    def train(flags, way, is_limited):
        folder = flags.output_dir / f"{way}-limited"
        folder.mkdir(exist_ok=True)
        plan = {"micro_batches": 1, "recompute": recompute}
        if recompute is not None:
            (folder / "micro_batches.json").write_text(json.dumps(plan))
        code = int(is_limited and way == "none")
        return subprocess.CompletedProcess([], code, "", refused if code else "")

    monkeypatch.setattr(one_example, "_train", train)
    monkeypatch.setattr(one_example, "_difference", lambda ours, theirs: difference)
    assert one_example.main([f"--output_dir={tmp_path / 'out'}"]) == 1
