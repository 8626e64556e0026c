"""The README's Keras example runs as printed."""

import re

from tests.helpers import running
from tests.helpers.keras_kinds import dense_data

_README = running.ROOT / "README.md"


def test_the_lines_of_the_readme_train(kind):
    blocks = re.findall(r"```python\n(.*?)```", _README.read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "estimator_accum.keras" in block]
    x, y = dense_data(40)
    names = {"keras": kind.keras, "model": kind.dense_model(), "x": x, "y": y}
    exec(code, names)  # noqa: S102, the README is this project's own
    assert int(names["optimizer"].iterations.numpy()) == 2
    assert int(names["optimizer"].micro_steps.numpy()) == 0
