"""The picture: the curves on both sides."""

import numpy as np
import pandas as pd
import pytest

from housing_example import plots

pytestmark = pytest.mark.once

_LABELS = ["with accumulation (59 x 3)", "without (177)"]


@pytest.fixture
def drawn():
    """(losses by label, predicted prices by label, true prices, the figure)."""
    losses = {
        label: pd.DataFrame(
            {"update_step": range(1, 61), "loss": np.linspace(80, 4 + number, 60)}
        )
        for number, label in enumerate(_LABELS)
    }
    truth = np.array([5.0, 20.0, 50.0])
    prices = {label: truth + number for number, label in enumerate(_LABELS, 1)}
    return losses, prices, truth, plots.draw(losses, prices, truth)


def test_losses_are_drawn_against_updates(drawn):
    losses, _, _, figure = drawn
    axes = figure.axes[0]
    assert axes.get_xlabel() == "optimizer updates"
    assert axes.get_ylabel() == "mean squared error [(unit of MEDV)²]"
    assert axes.get_yscale() == "log"
    legend = axes.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == _LABELS
    thin = [line for line in axes.lines if line.get_linewidth() < 1]
    for line, rows in zip(thin, losses.values(), strict=True):
        np.testing.assert_array_equal(line.get_xdata(), rows["update_step"])
        np.testing.assert_array_equal(line.get_ydata(), rows["loss"])
    bold = [line for line in axes.lines if line.get_linewidth() > 1]
    means = losses[_LABELS[0]]["loss"].iloc[30 - 12 : 30 + 13].mean()
    assert bold[0].get_ydata()[30] == pytest.approx(means)
    # The upper curve is narrower and dashed, so both are visible where they coincide.
    assert bold[0].get_linewidth() > 2 * bold[1].get_linewidth()
    assert not bold[0].is_dashed() and bold[1].is_dashed()


def test_prices_are_drawn_against_the_true_ones(drawn):
    _, prices, truth, figure = drawn
    axes = figure.axes[1]
    assert axes.get_xlabel() == "true price [unit of MEDV]"
    assert axes.get_ylabel() == "predicted price [unit of MEDV]"
    for points, label in zip(axes.collections, _LABELS, strict=True):
        expected = np.stack([truth, prices[label]], axis=1)
        np.testing.assert_array_equal(points.get_offsets(), expected)
    assert axes.lines[0].get_xydata().tolist() == [[5, 5], [50, 50]]
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert texts == ["predicted = true", *_LABELS]


def test_one_run_is_drawn_alone(tmp_path, drawn):
    losses, prices, truth, _ = drawn
    label = _LABELS[1]
    path = tmp_path / "housing.png"
    plots.write_plot(path, {label: losses[label]}, {label: prices[label]}, truth)
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert [entry.name for entry in tmp_path.iterdir()] == ["housing.png"]
