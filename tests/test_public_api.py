"""The promise of stability: public names, signatures, flags, files, variables stay."""

import importlib
import inspect
import json
import math
import pkgutil
import re

import numpy as np
import pytest
import tensorflow as tf

import estimator_accum
from bert_finetune.run_classifier import PROGRAM
from estimator_accum import keras, reports
from estimator_accum.__main__ import _COMMANDS
from tests.helpers.processes.running import ROOT

pytestmark = pytest.mark.once

_LINES = (ROOT / "tests/helpers/oracles/public_api.txt").read_text().splitlines()[1:]
_SIGNATURES = [line for line in _LINES if "(" in line]
_FLAGS = [line for line in _LINES if line.startswith("estimator-accum ")]
_CONTENTS = dict(line.split(": ") for line in _LINES if ": " in line)


def test_each_line_is_tested_and_each_public_name_is_in_the_table():
    assert len(_SIGNATURES) + len(_FLAGS) + len(_CONTENTS) == len(_LINES)
    names = {line.split("(")[0] for line in _SIGNATURES}
    names |= {name.rpartition(".")[0] for name in names}  # a class by its methods
    for module in (estimator_accum, keras, reports):
        assert {f"{module.__name__}.{name}" for name in module.__all__} <= names
    commands = {
        line.split(" --")[0].removeprefix("estimator-accum ") for line in _FLAGS
    }
    assert commands == set(_COMMANDS)


@pytest.mark.parametrize("line", _SIGNATURES, ids=lambda line: line.split("(")[0])
def test_a_signature_gains_optional_arguments_at_most(line):
    name, _, parameters = line.rstrip(")").partition("(")
    promised = eval(f"lambda {parameters}: 0", {"nan": math.nan})  # of our file
    promised = inspect.signature(promised).parameters
    received = inspect.signature(pkgutil.resolve_name(name)).parameters
    for parameter in promised.values():
        now = received[parameter.name]
        assert now.kind == parameter.kind
        assert repr(now.default) == repr(parameter.default)
    by_position = [n for n, p in promised.items() if p.kind == p.POSITIONAL_OR_KEYWORD]
    assert [*received][: len(by_position)] == by_position
    added = [p for name, p in received.items() if name not in promised]
    assert all(p.default is not p.empty or p.kind > p.KEYWORD_ONLY for p in added)


@pytest.mark.parametrize("line", _FLAGS, ids=lambda line: line.split(" --")[0])
def test_the_flags_of_a_command_stay(line, capsys):
    name, *flags = line.split(" --")
    name = name.removeprefix("estimator-accum ")
    if name == "train":
        names = {*PROGRAM.flags()}
        assert names - {*flags} <= {"v"}  # a flag that a release adds is promised, too
    else:
        module = _COMMANDS[name][0]
        module += ".__main__" if name == "compat" else ""
        with pytest.raises(SystemExit):
            raise SystemExit(importlib.import_module(module).main(["--help"]))
        names = set(re.findall(r"--(\w+)", capsys.readouterr().out))
    assert [flag for flag in flags if flag not in names] == []


def _model_fn(features, labels, mode, params):
    layer = tf.keras.layers.Dense(1, name="dense")
    loss = tf.reduce_mean((layer(features) - labels) ** 2)
    optimizer = tf.compat.v1.train.AdamOptimizer(0.01)
    train_op = estimator_accum.make_accumulating_train_op(loss, optimizer, 2)
    hooks = estimator_accum.make_accumulation_hooks(metrics_dir=params["metrics_dir"])
    return tf.estimator.EstimatorSpec(
        mode, loss=loss, train_op=train_op, training_hooks=hooks
    )


def _input_fn():
    data = np.ones([8, 3], np.float32), np.ones([8, 1], np.float32)
    return tf.data.Dataset.from_tensor_slices(data).batch(4)


def _contents(name: str) -> list[str]:
    """Returns the names that the table promises for a file or for variables."""
    return _CONTENTS[name].split()


def _variables(folder) -> list[str]:
    return sorted(name for name, _ in tf.train.list_variables(str(folder)))


def test_variables_and_columns_of_a_train_op_stay(tmp_path):
    folder = str(tmp_path)
    estimator = tf.estimator.Estimator(
        _model_fn, folder, params={"metrics_dir": folder}
    )
    estimator.train(_input_fn)
    assert _variables(tmp_path) == _contents("variables train op")
    assert _columns(tmp_path) == _contents("file train_metrics.csv")


def _columns(folder) -> list[str]:
    return (folder / "train_metrics.csv").read_text().splitlines()[0].split(",")


def test_columns_of_a_program_stay(tmp_path):
    reports.CsvReport(tmp_path, unit="examples").open(0)
    assert _columns(tmp_path) == _contents("file train_metrics.csv of examples")


def test_variables_and_number_of_micro_batches_of_a_whole_batch_stay(tmp_path):
    def model_fn(features, labels, mode):
        layer = tf.keras.layers.Dense(1, name="dense")
        loss = tf.reduce_mean((layer(features) - labels) ** 2)
        optimizer = tf.compat.v1.train.AdamOptimizer(0.01)
        step = tf.compat.v1.train.get_global_step()
        train_op = optimizer.minimize(loss, step)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    wrapped = estimator_accum.microbatch_model_fn(model_fn, "auto")
    (tmp_path / "micro_batches.json").write_text('{"micro_batches": 2}')
    tf.estimator.Estimator(wrapped, str(tmp_path)).train(_input_fn)
    assert _variables(tmp_path) == _contents("variables whole batch")
    content = json.loads((tmp_path / "micro_batches.json").read_text())
    assert content["micro_batches"] == 2
    assert [*content] == _contents("file micro_batches.json")


def test_variables_of_a_keras_optimizer_stay(tmp_path):
    variables = [tf.Variable(np.ones(shape, np.float32)) for shape in ([3, 1], [1])]
    optimizer = keras.accumulate(tf.keras.optimizers.Adam(), 2)
    optimizer.build(variables)
    path = tf.train.Checkpoint(optimizer=optimizer).save(str(tmp_path / "saved"))
    window = r"optimizer/accumulation_window/(.*)/\.ATTRIBUTES"
    matches = [re.match(window, name) for name, _ in tf.train.list_variables(path)]
    assert sorted(m[1] for m in matches if m) == _contents("variables Keras")


def test_the_file_of_a_run_s_settings_stays():
    required = ("output_dir", "task_name", "data_dir", "vocab_file", "bert_config_file")
    settings = PROGRAM.settings(**dict.fromkeys(required, "x"))
    content = settings.description(settings.batches(1), "checksum")
    assert sorted(content) == _contents("file run_settings.json")
    assert content["flags"]["task_name"] == "x"
