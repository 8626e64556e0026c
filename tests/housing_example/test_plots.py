"""The picture: the curves on both sides."""

import numpy as np
import pytest

from housing_example import plots
from housing_example.results import Result

pytestmark = pytest.mark.once

_LABELS = ["with accumulation (59 x 3)", "without (177)"]
_TRUTH = np.array([5.0, 20.0, 50.0])


def _result(number: int) -> Result:
    losses = {
        "update_step": np.arange(1.0, 61),
        "loss": np.linspace(80, 4 + number, 60),
    }
    return Result({}, _TRUTH + number, losses, {})


@pytest.mark.parametrize("labels", [_LABELS, _LABELS[1:]])
def test_losses_and_prices_of_one_or_two_models_are_drawn(labels):
    results = {label: _result(number) for number, label in enumerate(labels, 1)}
    left, right = plots.draw(results, _TRUTH).axes
    assert left.get_xlabel() == "optimizer updates"
    assert left.get_ylabel() == r"mean squared error [(\$1,000)²]"
    assert left.get_yscale() == "log"
    assert [text.get_text() for text in left.get_legend().get_texts()] == labels
    thin = [line for line in left.lines if line.get_linewidth() < 1]
    for line, result in zip(thin, results.values(), strict=True):
        columns = result.losses["update_step"], result.losses["loss"]
        np.testing.assert_array_equal(line.get_xydata(), np.stack(columns, 1))
    bold = [line for line in left.lines if line.get_linewidth() > 1]
    mean = results[labels[0]].losses["loss"][10:15].mean()
    assert bold[0].get_ydata()[10] == pytest.approx(mean)
    if len(bold) == 2:  # the upper curve is narrower and dashed: both are visible
        assert bold[0].get_linewidth() > 2 * bold[1].get_linewidth()
        assert not bold[0].is_dashed() and bold[1].is_dashed()
    assert right.get_xlabel() == r"true price [\$1,000]"
    assert right.get_ylabel() == r"predicted price [\$1,000]"
    for points, label in zip(right.collections, labels, strict=True):
        expected = np.stack([_TRUTH, results[label].prices], axis=1)
        np.testing.assert_array_equal(points.get_offsets(), expected)
    assert right.lines[0].get_xydata().tolist() == [[5, 5], [50, 50]]
    texts = [text.get_text() for text in right.get_legend().get_texts()]
    assert texts == ["predicted = true", *labels]
