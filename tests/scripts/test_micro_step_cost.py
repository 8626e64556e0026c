"""scripts/benchmarks/micro_step_cost.py on a tiny encoder, with a fake clock."""

import re

import pytest

from scripts.benchmarks import micro_step_cost

_TINY = {"hidden_size": 64, "num_layers": 1, "vocab_size": 50, "rounds": 1}
_TINY |= {"micro_batch_size": 2, "tokens": 4}
_SECS = {(): 2.0, ("on_nonfinite",): 1.6, ("noise_scale",): 2.2}  # by option


def _exit_code(monkeypatch, **flags) -> int:
    arguments = [f"--{name}={value}" for name, value in (_TINY | flags).items()]
    monkeypatch.setattr("sys.argv", ["micro_step_cost.py", *arguments])
    with pytest.raises(SystemExit) as left:
        micro_step_cost.main()
    return left.value.code


@pytest.mark.once
def test_the_ratios_are_printed_and_held_to_their_bound(monkeypatch, capsys):
    make, runs, secs = micro_step_cost._micro_step, {}, {}

    def made(arguments, options):
        name = tuple(options)
        if name not in runs:
            runs[name] = make(arguments, options)
            secs[runs[name]] = _SECS[name]
        return runs[name]

    def timed(run):
        run()
        return secs[run]

    monkeypatch.setattr(micro_step_cost, "_micro_step", made)
    monkeypatch.setattr(micro_step_cost, "_timed", timed)
    assert _exit_code(monkeypatch, largest_ratio=1.26) == 0
    row = r"(?m)^(\S+) +(\d\.\d{3}) of a micro-step"
    ratios = re.findall(row, capsys.readouterr().out)
    assert ratios == [('on_nonfinite="raise"', "1.250"), ("noise_scale=True", "1.100")]
    assert _exit_code(monkeypatch, largest_ratio=1.2) == 1
    assert _exit_code(monkeypatch, largest_ratio=1.05) == 1


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"rounds": 0}, r"--rounds must be an integer >= 1\. Received: 0\."),
        ({"hidden_size": 100}, "--hidden_size must be a multiple of 64.*Received: 100"),
    ],
)
def test_sizes_are_checked(flags, sentence, monkeypatch, capsys):
    assert _exit_code(monkeypatch, **flags) == 2
    assert re.search(sentence, capsys.readouterr().err)
