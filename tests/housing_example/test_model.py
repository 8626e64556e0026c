"""The model: 59 x 3 gives the weights of 177."""

import dataclasses
import pathlib
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum.programs.batches import Batches
from estimator_accum.programs.watchdog import Watchdog
from housing_example import input_pipeline, inputs, jobs, results
from housing_example.features import measure
from housing_example.model_fn import make_model_fn
from housing_example.table import TARGET, csv_text, read_table

# Relative to a variable's largest weight. The two sides add the same numbers in another
# order, which changes a sum by about 1e-7; after 500 updates they are at most 3.4e-6
# apart (six seeds, both datasets), since elu and a rate that falls to 0 keep the
# difference small.
_TOLERANCE = 2e-5
_UPDATES = 250


def _train(settings, name: str):
    """Trains one model in a folder of its own."""
    job = jobs.prepare(inputs.read(settings))
    batches = job.batches
    if name == "whole":
        batches = Batches(batches.effective_batch_size, 1, 1)
    folder = pathlib.Path(settings.output_dir).parent
    (folder / "train.csv").write_text(csv_text(job.train))
    (folder / "test.csv").write_text(csv_text(job.test))
    watchdog = Watchdog(300, "alone")
    return jobs.train_and_test(job, folder / name, batches, watchdog)


@pytest.fixture(scope="module")
def boston(request) -> str | None:
    """Path of the real data; None, which selects generated data, if it is missing."""
    try:
        folder = request.getfixturevalue("real_data")
    except pytest.skip.Exception:
        return None
    return str(folder / "housing" / "housingdata.csv")


@pytest.mark.once
def test_updates_of_59_x_3_give_weights_of_177(settings, boston, count_session_runs):
    settings = dataclasses.replace(settings, train_csv=boston, train_updates=_UPDATES)
    ran, runs = {}, {}
    for name in ("ours", "whole"):
        with mock.patch.object(jobs, "_UPDATES_BETWEEN_CHECKPOINTS", 150):
            runs[name] = count_session_runs(
                lambda name=name: ran.update({name: _train(settings, name)})
            )
    ours, whole = ran["ours"], ran["whole"]
    assert len(ours.weights) == 8
    assert results.largest_difference(ours.weights, whole.weights) < _TOLERANCE
    np.testing.assert_allclose(ours.metrics["rmse"], whole.metrics["rmse"], rtol=1e-4)
    np.testing.assert_allclose(ours.losses["loss"], whole.losses["loss"], rtol=1e-3)
    for result, micro_steps in ((ours, 3), (whole, 1)):
        assert result.metrics["global_step"] == _UPDATES * micro_steps
        examples = [177 * (n + 1) for n in range(_UPDATES)]
        assert result.losses["examples"].tolist() == examples
        updates = list(range(1, _UPDATES + 1))
        assert result.losses["update_step"].tolist() == updates
    # One run per micro-step; one more reads K for the first line, and one looks for an
    # open window at the end of the data.
    assert runs["ours"] - runs["whole"] == (3 - 1) * _UPDATES + 2
    truth = jobs.prepare(inputs.read(settings)).test[TARGET].to_numpy()
    error = ours.prices - truth
    assert ours.metrics["rmse"] == pytest.approx(np.sqrt(np.mean(error**2)), rel=1e-5)
    assert ours.metrics["mae"] == pytest.approx(np.mean(np.abs(error)), rel=1e-5)
    # The model has learnt: on the real data the mean price has 9.2, and 4.1 was
    # measured.
    assert ours.metrics["rmse"] < (4.6 if boston else 0.4 * truth.std())
    for name, steps in (("ours", 3), ("whole", 1)):  # whole updates apart
        folder = pathlib.Path(settings.output_dir).with_name(name)
        saved = {path.name for path in folder.glob("*.index")}
        assert saved == {f"model.ckpt-{n * steps}.index" for n in (150, _UPDATES)}
        assert list((folder / "eval").glob("events*"))  # also beside training


@pytest.mark.parametrize("mode", ["train", "eval", "infer"])
def test_layers_have_16_8_and_4_units_and_accumulators_only_in_training(
    settings, csv, mode
):
    table = read_table(str(csv))
    model_fn = make_model_fn(settings, measure(table), 3)
    with tf.Graph().as_default():
        features, labels = tf.compat.v1.data.make_one_shot_iterator(
            input_pipeline.eval_input_fn(csv, 20)()
        ).get_next()
        config = tf.estimator.RunConfig(model_dir=settings.output_dir)
        labels = None if mode == "infer" else labels
        spec = model_fn(features, labels, mode, config)
        names = [v.op.name for v in tf.compat.v1.global_variables()]
        shapes = [v.shape.as_list() for v in tf.compat.v1.trainable_variables()]
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            fetches = {"prices": spec.predictions["predictions"]}
            if mode == "eval":
                fetches["loss"] = spec.loss
            values = session.run(fetches)
    assert values["prices"].shape == (20, 1)
    kernels = [f"hidden_{number}/kernel" for number in range(3)]
    assert {*kernels, "price/kernel", "price/bias"} <= set(names)
    assert shapes == [[14, 16], [16], [16, 8], [8], [8, 4], [4], [4, 1], [1]]
    accumulators = [name for name in names if name.endswith("/accumulator")]
    assert len(accumulators) == (8 if mode == "train" else 0)
    assert ("update_step" in names) == (mode == "train")
    if mode == "eval":  # the mean, not the sum
        error = values["prices"][:, 0] - table[TARGET]
        assert values["loss"] == pytest.approx(np.mean(error**2), rel=1e-5)
