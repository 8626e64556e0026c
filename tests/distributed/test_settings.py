"""The sizes of a run: how they are derived, and which are refused."""

import dataclasses
import re

import pytest

from distributed import settings as settings_module
from distributed.settings import Settings, batches_of, check_settings
from estimator_accum.programs.batches import AUTO, Batches
from tests.helpers.models.short_run import settings

pytestmark = pytest.mark.once

_SETTINGS = settings(output_dir="output")


def _with(**values) -> Settings:
    return dataclasses.replace(_SETTINGS, **values)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_effective_batch_does_not_depend_on_the_workers(workers):
    assert batches_of(_SETTINGS, workers) == Batches(200, 1, workers)
    by_micro_batch = batches_of(_with(micro_batch_size=25), workers)
    assert by_micro_batch == Batches(200, 8 // workers, workers)
    by_steps = batches_of(_with(gradient_accumulation_steps=2), workers)
    assert by_steps == Batches(200, 2, workers)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_effective_batch_grows_with_the_workers_where_that_is_asked_for(workers):
    asked = _with(micro_batch_size=50, gradient_accumulation_steps=2)
    assert batches_of(asked, workers) == Batches(100 * workers, 2, workers)


def test_original_runs_have_one_effective_batch():
    for micro, steps, workers in ((200, 1, 1), (100, 2, 1), (100, 1, 2), (50, 2, 2)):
        sizes = _with(micro_batch_size=micro, gradient_accumulation_steps=steps)
        batches = batches_of(sizes, workers)
        assert batches.effective_batch_size == 200
        assert batches.largest_share == micro
    agreeing = dataclasses.replace(sizes, effective_batch_size=200)
    assert batches_of(agreeing, 2) == batches


def test_log_of_micro_batches_that_may_be_run_again_is_refused():
    check_settings(_with(micro_batch_size=AUTO))
    check_settings(_with(micro_batch_size=5, log_examples=True))
    with pytest.raises(ValueError, match=r"Received: --micro_batch_size=auto\. Use a"):
        check_settings(_with(micro_batch_size=AUTO, log_examples=True))


@pytest.mark.parametrize(
    "field, value",
    [
        *[("effective_batch_size", 0), ("gradient_accumulation_steps", -1)],
        *[("micro_batch_size", 0), ("train_updates", 0), ("hidden_units", 0)],
        *[("save_checkpoints_updates", 0), ("watchdog_secs", 2**31), ("seed", -1)],
        *[("learning_rate", 0.0), ("learning_rate", float("nan"))],
    ],
)
def test_values_out_of_range_are_refused(field, value):
    check_settings(_SETTINGS)
    sentence = rf"`--{field}` must be .*Received: {re.escape(str(value))}\. (See|Use)"
    with pytest.raises(ValueError, match=sentence):
        check_settings(_with(**{field: value}))


def _remembered(folder) -> Settings:
    settings = _with(output_dir=str(folder))
    settings_module.remember_settings(settings, batches_of(settings, 2), "sum")
    return settings


def test_run_goes_on_with_other_shares_of_the_same_batch(tmp_path):
    settings = _remembered(tmp_path)
    auto = {"micro_batch_size": AUTO, "effective_batch_size": 200}
    for shares in ({"gradient_accumulation_steps": 4}, auto):
        more = dataclasses.replace(settings, **shares)
        settings_module.check_output_dir(more, batches_of(more, 1), "sum")


def test_run_does_not_go_on_with_what_decides_the_weights(tmp_path):
    settings = _remembered(tmp_path)
    batches = batches_of(settings, 2)
    with pytest.raises(ValueError, match=r"whose run has other examples\. Use another"):
        settings_module.check_output_dir(settings, batches, "other")
    for changes, sentence in (
        ({"learning_rate": 0.2}, r"has --learning_rate=0\.1, not 0\.2\. "),
        ({"hidden_units": 65}, r"has --hidden_units=64, not 65\. "),
        ({"effective_batch_size": 100}, r"has --effective_batch_size=200, not 100\. "),
    ):
        other = dataclasses.replace(settings, **changes)
        with pytest.raises(ValueError, match=sentence):
            settings_module.check_output_dir(other, batches_of(other, 2), "sum")


def test_folder_of_another_program_is_refused(tmp_path):
    (tmp_path / "model.ckpt-7.index").touch()
    settings = _with(output_dir=str(tmp_path))
    with pytest.raises(ValueError, match=r"model\.ckpt-7\.index and no run_settings"):
        settings_module.check_output_dir(settings, batches_of(settings, 1), "sum")
    (tmp_path / "run_settings.json").write_text("{")
    with pytest.raises(ValueError, match=r"must be what a run has written"):
        settings_module.check_output_dir(settings, batches_of(settings, 1), "sum")
    file = _with(output_dir=str(tmp_path / "run_settings.json"))
    with pytest.raises(ValueError, match=r"must be a folder\. .*, a file\. "):
        settings_module.check_output_dir(file, batches_of(file, 1), "sum")
