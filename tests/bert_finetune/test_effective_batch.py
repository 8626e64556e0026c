"""One effective batch, cut in many ways: the same weights, also from one to another."""

import csv
import dataclasses
import json
import pathlib

import numpy as np
import pytest
import tensorflow as tf
from limited_memory import limited

from bert_finetune import jobs, modeling, training
from bert_finetune.output_dir import make_output_dir
from estimator_accum.batches import AUTO

pytestmark = [pytest.mark.slow, pytest.mark.once]

_UPDATES = 7


@pytest.fixture
def settings(settings):
    """2 x 50 examples, 16 an update: the last one has 4."""
    return dataclasses.replace(
        settings,
        do_train=True,
        num_train_epochs=2.0,
        effective_batch_size=16,
        gradient_accumulation_steps=None,
    )


class _Stop(Exception):
    """Ends a run as a kill would."""


def _run(settings, stop_after=None, **changes):
    """Does a run, or the first runs of its train op; returns its output folder."""
    settings = dataclasses.replace(settings, **changes)
    make_output_dir(settings.output_dir)
    with pytest.MonkeyPatch.context() as patch:
        if stop_after is not None:
            hook = _stopping(stop_after)
            patch.setattr(training, "RememberingHook", hook)
            with pytest.raises(_Stop):
                jobs.execute(jobs.prepare(settings))
        else:
            jobs.execute(jobs.prepare(settings))
    return pathlib.Path(settings.output_dir)


def _stopping(runs):
    class StoppingHook(training.RememberingHook):
        done = 0

        def after_run(self, run_context, run_values):
            self.done += 1
            if self.done == runs:
                raise _Stop

    return StoppingHook


def _weights(folder):
    reader = tf.train.load_checkpoint(str(folder))
    names = set(reader.get_variable_to_shape_map()) - {"global_step"}
    return {n: reader.get_tensor(n) for n in names if "accumul" not in n}


def _assert_close(ours, theirs):
    assert ours.keys() == theirs.keys() and len(ours) > 30
    assert ours["update_step"] == theirs["update_step"] == _UPDATES
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, atol=1e-5, err_msg=name)


def _examples(folder):
    with open(folder / "train_metrics.csv", newline="") as file:
        return [int(row["examples"]) for row in csv.DictReader(file)]


def test_weights_do_not_depend_on_how_an_update_is_cut(settings, monkeypatch):
    whole = _run(settings, output_dir=f"{settings.output_dir}_0", train_batch_size=16)
    three = _run(
        settings,
        output_dir=f"{settings.output_dir}_1",
        train_batch_size=3,
        do_eval=True,
    )
    monkeypatch.setattr(modeling, "encode", limited(modeling.encode, 5))
    auto = _run(settings, train_batch_size=AUTO, do_eval=True)
    expected = _weights(whole)
    for folder in (three, auto):
        _assert_close(_weights(folder), expected)
        assert _examples(folder) == [16, 32, 48, 64, 80, 96, 100]
        assert "update_step = 7" in (folder / "eval_results.txt").read_text()
    found = json.loads((auto / "micro_batches.json").read_text())
    assert found == {"micro_batches": 4}  # 16, 8, and then 4 at once
    steps = [_global_step(folder) for folder in (whole, three, auto)]
    assert steps == [7, 6 * 6 + 2, 7]


def _global_step(folder) -> int:
    return int(tf.train.load_checkpoint(str(folder)).get_tensor("global_step"))


@pytest.mark.parametrize(
    ("first", "stop_after", "then"),
    [(AUTO, 4, AUTO), (AUTO, 4, 4), (4, 13, AUTO)],
)
def test_a_run_goes_on_cut_in_another_way(settings, first, stop_after, then):
    undisturbed = f"{settings.output_dir}_undisturbed"
    expected = _weights(_run(settings, output_dir=undisturbed, train_batch_size=then))
    steps = {"save_checkpoints_steps": 12 if first == 4 else 3}
    _run(settings, stop_after, train_batch_size=first, **steps)
    folder = _run(settings, train_batch_size=then, **steps)
    ours = _weights(folder)
    _assert_close(ours, expected)
    assert _examples(folder) == [16, 32, 48, 64, 80, 96, 100]
    if first == then:
        for name, value in expected.items():
            np.testing.assert_array_equal(ours[name], value, err_msg=name)


def test_an_update_that_was_begun_does_not_go_on_cut_in_another_way(settings):
    _run(settings, 7, train_batch_size=4, save_checkpoints_steps=6)
    message = (
        r"An update that a checkpoint holds half of must go on as it began\. Received: "
        r".*, whose run has --train_batch_size=4, not auto\. Use the same, or another"
    )
    with pytest.raises(ValueError, match=message):
        _run(settings, train_batch_size=AUTO)


def test_another_effective_batch_is_refused(settings):
    _run(settings, 1, train_batch_size=4)
    with pytest.raises(
        ValueError, match=r"has --effective_batch_size=16, not 20\. Use"
    ):
        _run(settings, train_batch_size=4, effective_batch_size=20)


def test_a_folder_of_before_effective_batches_were_written_goes_on(settings):
    folder = _run(settings, 7, train_batch_size=4, save_checkpoints_steps=6)
    path = folder / "run_settings.json"
    values = json.loads(path.read_text())
    for field in ("effective_batch_size", "replicas"):
        del values[field]
    path.write_text(json.dumps(values))
    _run(settings, train_batch_size=4)
    assert _weights(folder)["update_step"] == _UPDATES
