"""Checkpoints of the encoder: check one, start a model from one, write one.

The required variables are read from the encoder itself, never from a list.
"""

import dataclasses
import functools
import hashlib
import logging
import re
import types
from collections.abc import Iterable, Mapping

import numpy as np
import tensorflow as tf

from bert_finetune.bert_config import BertConfig
from bert_finetune.modeling import encode
from estimator_accum.programs.folder import fault_of_checkpoints

_logger = logging.getLogger("tensorflow.bert_finetune")

_SCOPE = "bert"
# The replica, under a tf.distribute strategy, and the end of every variable's name.
_NAME_SUFFIX = re.compile(r"(/replica_\d+)?:\d+$")

# TensorFlow's reader turns only some of its errors into tf.errors.
_READ_ERRORS = (tf.errors.OpError, RuntimeError, IndexError, ValueError)


@functools.lru_cache(maxsize=4)  # building the graph takes longer than a check
def encoder_shapes(config: BertConfig) -> Mapping[str, tuple[int, ...]]:
    """Returns the shape of every variable that `encode` makes, by its name."""
    with tf.Graph().as_default():
        ids = tf.compat.v1.placeholder(tf.int32, [None, None])
        encode(config, ids, ids, ids, is_training=False, scope=_SCOPE)
        return types.MappingProxyType(_trainable_shapes())


def check_checkpoint(
    path: str, config: BertConfig, num_labels: int | None = None
) -> None:
    """Checks that a model can start from a checkpoint.

    Everything in it is read once, so that a truncated file is found here and not in a
    session.

    Args:
        path: Path or prefix of the checkpoint, such as `folder/bert_model.ckpt`,
            without `.index`.
        config: Configuration of the encoder.
        num_labels: Outputs of the classifier that the checkpoint must hold as well;
            None requires no classifier. Other variables (Adam's slots) are not checked.

    Raises:
        ValueError: If the checkpoint does not exist or cannot be read, a variable is
            missing or has another shape, or its encoder has more layers.
    """
    reader = _open(path)
    shapes = reader.get_variable_to_shape_map()
    num_layers = _num_layers(shapes)
    if num_layers > config.num_hidden_layers:
        raise ValueError(
            f"`num_hidden_layers` must be that of {path}, {num_layers}. Received: "
            f"{config.num_hidden_layers}. Use the checkpoint's own bert_config.json."
        )
    # The first extra layer is reported as missing: no need to build all of them.
    layers = min(config.num_hidden_layers, num_layers + 1)
    expected = encoder_shapes(dataclasses.replace(config, num_hidden_layers=layers))
    _check_variables(path, reader, expected)
    if num_labels is not None:
        _check_classifier(path, shapes, num_labels)
    for name in shapes:
        try:
            reader.get_tensor(name)
        except _READ_ERRORS as error:
            raise _unreadable(path, error) from error


def _num_layers(names: Iterable[str]) -> int:
    layers = [re.match(rf"{_SCOPE}/encoder/layer_(\d+)/", name) for name in names]
    return max((int(layer[1]) + 1 for layer in layers if layer), default=0)


def _check_classifier(
    path: str, shapes: Mapping[str, list[int]], num_labels: int
) -> None:
    shape = shapes.get("output_weights")
    if not shape or shape[0] != num_labels:
        raise ValueError(
            f"{path} must hold a trained classifier of {num_labels} outputs. Received: "
            f"{f'one of {shape[0]}' if shape else 'none'}. Use the --task_name that it "
            "was trained on, or train one with --do_train=true."
        )


def init_from_checkpoint(path: str) -> list[str]:
    """Makes the model of the current graph start from a checkpoint.

    For a model_fn, after the model is built: replaces the initializers of all trainable
    variables in the scope `bert`, also under a tf.distribute strategy, and those of a
    head (every other trainable variable) if the checkpoint is a fine-tuned one that
    holds it in the same shape. A head of another shape starts untrained, which is
    logged. Adam's slots keep their initializers.

    Args:
        path: Prefix of the checkpoint, such as `folder/bert_model.ckpt`.

    Returns:
        The names of the variables, as in the checkpoint.

    Raises:
        ValueError: If the graph holds no encoder; the checkpoint does not exist or
            cannot be read; or a variable of the encoder is missing from it or has
            another shape.
    """
    shapes = _trainable_shapes()
    expected = {n: s for n, s in shapes.items() if n.startswith(f"{_SCOPE}/")}
    if not expected:
        raise ValueError(
            f"The graph must hold an encoder in the scope `{_SCOPE}`. Received: "
            f"{len(shapes)} trainable variables, none of them there. Call `encode` "
            "before `init_from_checkpoint`."
        )
    head = {name: shape for name, shape in shapes.items() if name not in expected}
    reader = _open(path)
    _check_variables(path, reader, expected)
    names = [*expected, *_head_in_checkpoint(path, reader, head)]
    tf.compat.v1.train.init_from_checkpoint(path, {name: name for name in names})
    return names


def _head_in_checkpoint(path: str, reader, head: Mapping[str, tuple]) -> list[str]:
    """Returns the names of the head if the checkpoint holds all of it, else none."""
    shapes = reader.get_variable_to_shape_map()
    if not head.keys() <= shapes.keys():
        return []
    if all(tuple(shapes[name]) == shape for name, shape in head.items()):
        return sorted(head)
    _logger.info(
        "the classifier of %s has other classes: a new one starts untrained", path
    )
    return []


def write_checkpoint(arrays: Mapping[str, np.ndarray], path: str) -> None:
    """Writes a checkpoint that holds exactly these arrays.

    Args:
        arrays: Arrays by variable name.
        path: Prefix such as `folder/bert_model.ckpt`, in an existing folder. Writes
            `path.index` and `path.data-00000-of-00001`.
    """
    names = sorted(arrays)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        # Fed, not constants: a graph holds at most 2 GB.
        tensors = [
            tf.compat.v1.placeholder(arrays[name].dtype, arrays[name].shape)
            for name in names
        ]
        save = tf.raw_ops.SaveV2(
            prefix=path,
            tensor_names=names,
            shape_and_slices=[""] * len(names),
            tensors=tensors,
        )
        session.run(save, {t: arrays[n] for t, n in zip(tensors, names, strict=True)})


def checksum_of(path: str) -> str:
    """Returns the SHA-256 checksum of a checkpoint's index, which has one per tensor.

    Raises:
        ValueError: If the checkpoint does not exist or cannot be read.
    """
    _open(path)
    with tf.io.gfile.GFile(f"{path}.index", "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def _trainable_shapes() -> dict[str, tuple[int, ...]]:
    return {
        _NAME_SUFFIX.sub("", variable.name): tuple(variable.shape.as_list())
        for variable in tf.compat.v1.trainable_variables()
    }


def _open(path: str):
    """Returns a reader of the checkpoint."""
    if fault := fault_of_checkpoints(path):
        raise ValueError(f"A checkpoint {fault}")
    try:
        has_index = tf.io.gfile.exists(f"{path}.index")
        has_data = has_index and tf.io.gfile.glob(f"{path}.data-*")
    except tf.errors.OpError as error:  # such as an unknown file system
        raise _unreadable(path, error) from error
    if not has_index:
        raise ValueError(
            f"A checkpoint must have an index file. Received: {path}, but there is no "
            f"{path}.index. {_suggestion(path)}"
        )
    if not has_data:
        raise ValueError(
            f"A checkpoint must have data files beside its index. Received: {path}, "
            f"but there is no {path}.data-00000-of-00001. Copy all its files."
        )
    try:
        return tf.compat.v1.train.NewCheckpointReader(path)
    except _READ_ERRORS as error:
        raise _unreadable(path, error) from error


def _suggestion(path: str) -> str:
    folder = path if tf.io.gfile.isdir(path) else path.rpartition("/")[0] or "."
    indexes = sorted(tf.io.gfile.glob(f"{folder}/*.index"))
    if not indexes and tf.io.gfile.glob(f"{folder}/*.safetensors"):
        return (
            "Convert Hugging Face's files first: "
            f"estimator-accum import --input_dir={folder} --output_dir=converted"
        )
    prefixes = ", ".join(index.removesuffix(".index") for index in indexes[:5])
    return f"There is: {prefixes}." if indexes else "Give it as folder/bert_model.ckpt."


def _unreadable(path: str, error: Exception) -> ValueError:
    reason = str(getattr(error, "message", error)).splitlines()[0]
    return ValueError(
        f"{path} must be a complete TensorFlow checkpoint. Received: files that cannot "
        f"be read ({reason}). Copy or download it again."
    )


def _check_variables(path: str, reader, expected: Mapping[str, tuple]) -> None:
    shapes = reader.get_variable_to_shape_map()
    dtypes = reader.get_variable_to_dtype_map()
    for name, shape in expected.items():
        if name not in shapes:
            raise ValueError(
                f"{path} must hold the variable `{name}` with the shape "
                f"{list(shape)}. Received: {_description(shapes)}. Use a checkpoint of "
                "BERT and its own bert_config.json."
            )
        if tuple(shapes[name]) != shape or dtypes[name] != tf.float32:
            raise ValueError(
                f"`{name}` in {path} must have the shape {list(shape)} and the type "
                f"float32. Received: {shapes[name]}, {dtypes[name].name}. Use the "
                "checkpoint's own bert_config.json."
            )


def _description(names) -> str:
    """Returns a short description of a checkpoint's content."""
    in_scope = [name for name in names if name.startswith(f"{_SCOPE}/")]
    some = ", ".join(sorted(in_scope or names)[:3])
    return f"{len(names)} variables, {len(in_scope)} in `{_SCOPE}/`, such as {some}"
