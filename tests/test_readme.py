"""What the README prints runs as printed."""

import pathlib
import re

import legacy_runs
import numpy as np
import pytest
import tensorflow as tf

from bert_finetune import run_classifier
from estimator_accum import get_or_create_update_step

_README = (pathlib.Path(__file__).parent.parent / "README.md").read_text()
_CODE = re.findall(r"```python\n(.*?)```", _README, re.DOTALL)


def _network(features):
    weights = tf.compat.v1.get_variable(
        "weights", [3, 1], initializer=tf.compat.v1.zeros_initializer()
    )
    return tf.matmul(features, weights)


def test_the_ten_lines_train_like_the_big_batch(tmp_path):
    random = np.random.default_rng(0)
    data = random.normal(size=[64, 3]), random.normal(size=[64, 1])
    data = tuple(part.astype(np.float32) for part in data)

    def train(code, batch, folder):
        names = {"network": _network}
        exec(code, names)  # noqa: S102, the README is this project's own
        estimator = tf.estimator.Estimator(names["model_fn"], str(folder))
        estimator.train(lambda: tf.data.Dataset.from_tensor_slices(data).batch(batch))
        return estimator.get_variable_value("weights")

    code = _CODE[0]
    assert "gradient_accumulation_steps=4" in code
    whole = code.replace(
        "gradient_accumulation_steps=4", "gradient_accumulation_steps=1"
    )
    ours = train(code, 4, tmp_path / "ours")
    np.testing.assert_allclose(ours, train(whole, 16, tmp_path / "whole"), rtol=1e-5)
    assert np.all(ours != 0)


def test_the_migrated_script_has_two_more_lines():
    before, after = (code.splitlines() for code in _CODE[1:3])
    assert all(line in after for line in before)
    added = [line for line in after if line and line not in before]
    assert added == legacy_runs.TWO_LINES.splitlines()


def test_the_update_step_of_the_readme_is_a_counter():
    with tf.Graph().as_default():
        assert get_or_create_update_step().dtype == tf.int64


@pytest.mark.parametrize("flag", sorted(set(re.findall(r"--([a-z_]+)=", _README))))
def test_every_flag_in_the_readme_exists(flag):
    scripts = (pathlib.Path(__file__).parent.parent / "scripts").glob("*.py")
    texts = [path.read_text() for path in scripts]
    assert flag in run_classifier.FLAGS or any(f'"--{flag}"' in text for text in texts)
