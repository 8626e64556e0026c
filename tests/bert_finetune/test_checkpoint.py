"""Checking a checkpoint, starting an encoder from one, writing one."""

import dataclasses
import re

import numpy as np
import pytest
import tensorflow as tf

from bert_finetune import checkpoint
from bert_finetune.checkpoint import check_checkpoint, encoder_shapes
from bert_finetune.modeling import classifier_logits, encode
from tests.helpers.models import tiny_bert

_CONFIG = dataclasses.replace(tiny_bert.CONFIG, num_hidden_layers=2)
_WORDS = "bert/embeddings/word_embeddings"
_QUERY = "bert/encoder/layer_1/attention/self/query/kernel"


def _arrays():
    generator = np.random.default_rng(0)
    return {
        name: generator.standard_normal(shape).astype(np.float32)
        for name, shape in encoder_shapes(_CONFIG).items()
    }


def _write(folder, arrays, name="bert_model.ckpt"):
    path = str(folder / name)
    checkpoint.write_checkpoint(arrays, path)
    return path


def _build_classifier():
    ids = tf.constant([[1, 2, 3]])
    tf.compat.v1.train.get_or_create_global_step()
    output = encode(_CONFIG, ids, tf.ones_like(ids), ids * 0, is_training=True)
    return classifier_logits(output.pooled, 2, is_training=True)


def _initial_values():
    with tf.compat.v1.Session() as session:
        session.run(tf.compat.v1.global_variables_initializer())
        variables = tf.compat.v1.trainable_variables()
        return session.run({v.op.name: v.read_value() for v in variables})


def test_shapes_of_the_encoder_leave_the_current_graph_alone():
    with tf.Graph().as_default() as graph:
        shapes = encoder_shapes(_CONFIG)
        assert not graph.get_operations()
    assert (len(shapes), shapes[_WORDS]) == (5 + 2 * 16 + 2, (25, 16))


def test_written_arrays_are_read_back(tmp_path):
    arrays = {"a/b": np.float32([[1, 2]]), "global_step": np.int64(7)}
    reader = tf.train.load_checkpoint(_write(tmp_path, arrays, "some.ckpt"))
    assert reader.get_variable_to_shape_map() == {"a/b": [1, 2], "global_step": []}
    for name, array in arrays.items():
        np.testing.assert_array_equal(reader.get_tensor(name), array)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"some.ckpt.index", "some.ckpt.data-00000-of-00001"}


def test_checkpoint_with_slots_and_a_classifier_of_the_right_classes_passes(tmp_path):
    arrays = _arrays() | {"output_weights": np.zeros([3, 16], np.float32)}
    arrays["cls/predictions/output_bias"] = np.zeros([25], np.float32)
    arrays[f"{_WORDS}/adam_m"] = np.zeros([25, 16], np.float32)
    path = _write(tmp_path, arrays)
    check_checkpoint(path, _CONFIG)
    check_checkpoint(path, _CONFIG, num_labels=3)


def _with_head(classes: int):
    return lambda arrays: (
        arrays | {"output_weights": np.ones([classes, 16], np.float32)}
    )


def _with_double(arrays):
    return arrays | {_QUERY: arrays[_QUERY].astype(np.float64)}


@pytest.mark.parametrize(
    ("arrays_of", "changes", "sentence"),
    [
        (_with_head(2), {}, "{path} must hold a trained classifier of 3 .*: one of 2"),
        (dict, {}, "{path} must hold a trained classifier of 3 outputs. Rec.*: none"),
        (dict, {"num_hidden_layers": 1}, "`num_hidden_layers` .* of {path}, 2. Rec"),
        (dict, {"num_hidden_layers": 3}, r"2/.*query/kernel` .* \[16, 16\]. R.*, 39 i"),
        (dict, {"vocab_size": 26}, rf"`{_WORDS}` in .* \[26, 16\] .* \[25, 16\], fl"),
        (_with_double, {}, r"Received: \[16, 16\], float64"),
        (lambda _: {"a": np.zeros(2)}, {}, "1 variables, 0 in `bert/`, such as a"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    tmp_path, arrays_of, changes, sentence
):
    path = _write(tmp_path, arrays_of(_arrays()))
    config = dataclasses.replace(_CONFIG, **changes)
    with pytest.raises(ValueError, match=sentence.replace("{path}", re.escape(path))):
        check_checkpoint(path, config, num_labels=3)


def test_a_checkpoint_that_tensorflow_takes_for_a_pattern_is_refused(tmp_path):
    path = str(tmp_path / "bert[1]" / "model.ckpt")
    with pytest.raises(
        ValueError, match=r"^A checkpoint must have no \[.*bert\[1\]/mod"
    ):
        check_checkpoint(path, _CONFIG)


def test_a_checkpoint_of_far_fewer_layers_is_refused_without_building_them(
    tmp_path, monkeypatch
):
    path = _write(tmp_path, _arrays())
    config = dataclasses.replace(_CONFIG, num_hidden_layers=1000)
    built = []

    def noted(config):
        built.append(config.num_hidden_layers)
        return encoder_shapes(config)

    monkeypatch.setattr(checkpoint, "encoder_shapes", noted)
    with pytest.raises(ValueError, match="hold the variable `bert/encoder/layer_2"):
        check_checkpoint(path, config)
    assert built == [3]


_INCOMPLETE = "{path} must be a complete TensorFlow checkpoint. Received: files that"


def _changed(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :]


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda content: content[: len(content) // 2], _INCOMPLETE),
        (lambda content: content[:-20], _INCOMPLETE),  # of the data, the head's
        (_changed, _INCOMPLETE),
        (lambda _: b"", _INCOMPLETE),
        (None, r"A checkpoint must have .* Received: {path}, but there is no {file}\."),
    ],
)
@pytest.mark.parametrize("end", ["index", "data-00000-of-00001"])
def test_a_damaged_or_missing_file_is_refused(tmp_path, end, damage, sentence):
    path = _write(tmp_path, _with_head(3)(_arrays()))
    file = tmp_path / f"bert_model.ckpt.{end}"
    content = file.read_bytes()
    file.unlink()
    if damage is not None:
        file.write_bytes(damage(content))
    for name, value in (("{path}", path), ("{file}", str(file))):
        sentence = sentence.replace(name, re.escape(value))
    with pytest.raises(ValueError, match=sentence):
        check_checkpoint(path, _CONFIG)


@pytest.mark.parametrize("ending", ["", "/bert_model", "/bert_model.ckpt.index"])
def test_path_that_is_almost_right_gets_a_suggestion(ending, tmp_path):
    path = _write(tmp_path, _arrays())
    with pytest.raises(ValueError, match=rf"There is: {re.escape(path)}\."):
        check_checkpoint(f"{tmp_path}{ending}", _CONFIG)


def test_files_of_hugging_face_are_to_be_converted(tmp_path):
    (tmp_path / "model.safetensors").touch()
    remedy = rf"estimator-accum import --input_dir={tmp_path} --output_dir="
    with pytest.raises(ValueError, match=remedy):
        check_checkpoint(f"{tmp_path}/model.safetensors", _CONFIG)


def test_encoder_starts_from_the_checkpoint_and_the_head_does_not(tmp_path):
    arrays = _arrays()
    slots = {f"{name}/adam_m": array for name, array in arrays.items()}
    head = {"output_weights": np.full([2, 16], 9.0, np.float32)}
    path = _write(tmp_path, {**arrays, **slots, **head})
    with tf.Graph().as_default():
        _build_classifier()
        names = checkpoint.init_from_checkpoint(path)
        values = _initial_values()
    assert sorted(names) == sorted(arrays)
    for name in names:
        np.testing.assert_array_equal(values[name], arrays[name])
    assert np.abs(values["output_weights"]).max() < 9.0


def test_variables_of_the_optimizer_keep_their_initializers(tmp_path):
    path = _write(tmp_path, _arrays())
    with tf.Graph().as_default():
        logits = _build_classifier()
        with tf.compat.v1.variable_scope("bert/pooler"):
            slot = tf.compat.v1.get_variable("slot", [2], trainable=False)
        assert slot.op.name not in checkpoint.init_from_checkpoint(path)
        optimizer = tf.compat.v1.train.AdamOptimizer(0.1)
        optimizer.minimize(tf.reduce_sum(logits))
        _initial_values()


def test_init_from_a_checkpoint_that_does_not_fit_names_the_variable(tmp_path):
    arrays = _arrays()
    del arrays[_QUERY]
    path = _write(tmp_path, arrays)
    with tf.Graph().as_default():
        _build_classifier()
        with pytest.raises(ValueError, match=f"must hold the variable `{_QUERY}`"):
            checkpoint.init_from_checkpoint(path)


def test_init_without_an_encoder_in_the_graph_is_refused(tmp_path):
    path = _write(tmp_path, _arrays())
    with tf.Graph().as_default():
        tf.compat.v1.get_variable("dense/kernel", [2, 2])
        sentence = "must hold an encoder in the scope `bert`. Received: 1 trainable var"
        with pytest.raises(ValueError, match=sentence):
            checkpoint.init_from_checkpoint(path)


def test_every_replica_of_a_strategy_starts_from_the_checkpoint(tmp_path):
    arrays = _arrays()
    path = _write(tmp_path, arrays)
    two_cpus = tf.compat.v1.ConfigProto(device_count={"CPU": 2})
    with tf.Graph().as_default():
        strategy = tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])
        names = []

        def build():
            _build_classifier()
            names.append(checkpoint.init_from_checkpoint(path))

        with strategy.scope():
            strategy.extended.call_for_each_replica(build)
        variables = tf.compat.v1.trainable_variables()
        copies = [copy for v in variables for copy in v.values]
        with tf.compat.v1.Session(config=two_cpus) as session:
            session.run(tf.compat.v1.global_variables_initializer())
            values = session.run({v.name: v.read_value() for v in copies})
    assert len(names) == 2
    assert sorted(names[0]) == sorted(names[1]) == sorted(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(values[f"{name}:0"], array)
        np.testing.assert_array_equal(values[f"{name}/replica_1:0"], array)
