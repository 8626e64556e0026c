"""Sizes of an update: how they are derived, and with which other sizes a run resumes.

For the resulting weights see test_model.py and test_strategies.py.
"""

import dataclasses
import pathlib

import pytest

from estimator_accum.programs.batches import AUTO, Batches
from housing_example.settings import batches_of, check_output_dir, remember_settings


def _with(settings, **changes):
    """Returns settings with only the given sizes."""
    names = ("effective_batch_size", "train_batch_size", "gradient_accumulation_steps")
    return dataclasses.replace(settings, **dict.fromkeys(names) | changes)


@pytest.mark.parametrize("replicas", [1, 2])
def test_effective_batch_grows_with_the_replicas_unless_it_is_given(settings, replicas):
    assert batches_of(_with(settings), replicas) == Batches(177 * replicas, 3, replicas)
    other = _with(settings, train_batch_size=10, gradient_accumulation_steps=2)
    assert batches_of(other, replicas) == Batches(20 * replicas, 2, replicas)
    given = _with(settings, effective_batch_size=100, train_batch_size=8)
    assert batches_of(given, replicas) == Batches(100, -(-13 // replicas), replicas)


def test_folder_goes_on_in_another_cut_of_the_same_updates_only(settings):
    pathlib.Path(settings.output_dir).mkdir()
    settings = _with(settings, effective_batch_size=100)
    remember_settings(settings, Batches(100, 1, 1), "sum")
    other = dataclasses.replace(settings, train_batch_size=AUTO, strategy="mirrored")
    check_output_dir(other, Batches(100, 3, 2), "sum")
    with pytest.raises(ValueError, match=r"has --effective_batch_size=100, not 177\. "):
        check_output_dir(settings, Batches(177, 1, 1), "sum")
