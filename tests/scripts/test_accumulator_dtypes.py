"""scripts/experiments/accumulator_dtypes.py: errors of accumulators in fewer bits."""

import re

from scripts.experiments import accumulator_dtypes


def test_fewer_bits_give_up_the_same_weights(capsys):
    assert accumulator_dtypes.main(["--micro_steps", "4", "--updates=3"]) == 0
    found = re.findall(r"(\w+) +gradient (\S+)  weights (\S+)", capsys.readouterr().out)
    assert [name for name, *_ in found] == ["bfloat16", "float16"]
    (bfloat16, weights), (float16, _) = [map(float, errors) for _, *errors in found]
    assert 1e-3 < bfloat16 < 2 / 256 and weights > 1e-3
    assert float16 < bfloat16 / 4


def test_an_error_beyond_rounding_is_exit_code_1(monkeypatch):
    train = accumulator_dtypes._train

    def off(dtype, steps, updates):
        mean, weights = train(dtype, steps, updates)
        return (mean * 1.02 if dtype.name == "bfloat16" else mean), weights

    monkeypatch.setattr(accumulator_dtypes, "_train", off)
    assert accumulator_dtypes.main(["--micro_steps", "4", "--updates=1"]) == 1
