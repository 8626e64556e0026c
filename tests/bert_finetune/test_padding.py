"""Examples of like length padded together: the results of the padded run."""

import dataclasses

import numpy as np
import pytest
from tiny_bert import results, run, variables

from estimator_accum.batches import AUTO


@pytest.fixture
def settings(settings):
    """8 x 50 examples, 8 an update: 50 updates."""
    return dataclasses.replace(
        settings,
        do_train=True,
        do_eval=True,
        do_predict=True,
        num_train_epochs=8.0,
    )


def _run(settings, name, **changes):
    return run(settings, output_dir=f"{settings.output_dir}_{name}", **changes)


def _values(folder):
    return {n: v for n, v in variables(folder).items() if n != "global_step"}


@pytest.mark.slow
@pytest.mark.once
def test_weights_metrics_and_predictions_do_not_depend_on_padding(settings):
    padded = _run(settings, "padded", pad_to_max_length=True)
    trimmed = _run(settings, "trimmed")
    only_train = {"do_eval": False, "do_predict": False}
    tokens = _run(settings, "tokens", tokens_per_micro_batch=30, **only_train)
    auto = _run(
        settings,
        "auto",
        effective_batch_size=8,
        train_batch_size=AUTO,
        gradient_accumulation_steps=None,
        **only_train,
    )
    expected = _values(padded)
    assert expected["update_step"] == 50
    for folder in (trimmed, tokens, auto):
        values = _values(folder)
        assert values.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(
                values[name], value, atol=1e-5, err_msg=f"{folder}: {name}"
            )
    probabilities, found = (
        np.loadtxt(folder / "test_results.tsv") for folder in (padded, trimmed)
    )
    assert np.ptp(probabilities[:, 0]) > 0.1  # or their order could not be seen
    np.testing.assert_allclose(found, probabilities, atol=1e-5)
    assert (trimmed / "CoLA.tsv").read_text() == (padded / "CoLA.tsv").read_text()
    metrics, found = results(padded), results(trimmed)
    for metric, value in metrics.items():
        np.testing.assert_allclose(found[metric], value, rtol=1e-4, err_msg=metric)
    steps = variables(tokens)["global_step"]
    assert steps != metrics["global_step"] == 100  # windows of 2, or of what fits
