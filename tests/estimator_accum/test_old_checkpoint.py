"""Checkpoints that version 0.1.0 has written in mid-window resume as they did there."""

import pathlib

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import old_checkpoint

_FOLDER = pathlib.Path(__file__).parent / "data" / "old_checkpoint"


@pytest.mark.parametrize("name", ["v1", "keras"])
def test_a_checkpoint_of_an_older_version_resumes_in_mid_window(name, tmp_path):
    if name == "v1":
        train = old_checkpoint.train_v1
    else:
        train = old_checkpoint.train_keras
    first, stop = old_checkpoint.STOPPED, old_checkpoint.MICRO_STEPS
    restored = _FOLDER / name / "model.ckpt"
    values = train(str(tmp_path), first, stop, str(restored))
    with np.load(_FOLDER / f"{name}.npz") as expected:
        assert set(values) == set(expected)
        for variable in expected:
            np.testing.assert_allclose(
                values[variable], expected[variable], rtol=1e-6, err_msg=variable
            )
    ours, theirs = (
        tf.train.load_checkpoint(str(path)).get_variable_to_shape_map()
        for path in (tmp_path / "model.ckpt", restored)
    )
    ours.pop("save_counter/.ATTRIBUTES/VARIABLE_VALUE", None)
    assert ours == theirs
