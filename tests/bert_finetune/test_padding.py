"""Examples of like length padded together: the results of the padded run."""

import dataclasses
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from bert_finetune import jobs
from bert_finetune.output_dir import make_output_dir
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
    output_dir = f"{settings.output_dir}_{name}"
    settings = dataclasses.replace(settings, output_dir=output_dir, **changes)
    run = jobs.prepare(settings)
    make_output_dir(output_dir)
    jobs.execute(run)
    return pathlib.Path(output_dir)


def _values(folder):
    reader = tf.train.load_checkpoint(str(folder))
    names = set(reader.get_variable_to_shape_map()) - {"global_step"}
    return {n: reader.get_tensor(n) for n in names if "accumul" not in n}


def _results(folder):
    lines = (folder / "eval_results.txt").read_text().splitlines()
    return {name: float(value) for name, value in (line.split(" = ") for line in lines)}


@pytest.mark.slow
@pytest.mark.once
def test_weights_metrics_and_predictions_do_not_depend_on_padding(settings):
    padded = _run(settings, "padded", pad_to_max_length=True)
    ours = {
        "trimmed": _run(settings, "trimmed"),
        "tokens": _run(settings, "tokens", tokens_per_micro_batch=30),
        "auto": _run(
            settings,
            "auto",
            effective_batch_size=8,
            train_batch_size=AUTO,
            gradient_accumulation_steps=None,
        ),
    }
    expected, results = _values(padded), _results(padded)
    probabilities = np.loadtxt(padded / "test_results.tsv")
    assert results["update_step"] == 50
    assert np.ptp(probabilities[:, 0]) > 0.1  # or their order could not be seen
    for name, folder in ours.items():
        values = _values(folder)
        assert values.keys() == expected.keys()
        for variable, value in expected.items():
            np.testing.assert_allclose(
                values[variable], value, atol=1e-5, err_msg=f"{name}: {variable}"
            )
        found = np.loadtxt(folder / "test_results.tsv")
        np.testing.assert_allclose(found, probabilities, atol=1e-5, err_msg=name)
        assert (folder / "CoLA.tsv").read_text() == (padded / "CoLA.tsv").read_text()
        for metric in results.keys() - {"global_step"}:
            np.testing.assert_allclose(
                _results(folder)[metric], results[metric], rtol=1e-4, err_msg=metric
            )
    steps = _results(ours["tokens"])["global_step"]
    assert steps != results["global_step"] == 100  # windows of 2, or of what fits
