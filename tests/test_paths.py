"""Paths that flags name are on this machine, or TensorFlow reads them."""

import importlib
import re

import numpy as np
import pytest
import tensorflow as tf
from absl import flags

from bert_finetune import checkpoint
from estimator_accum.programs import command_line, folder
from estimator_accum.programs.program import Program
from estimator_accum.programs.sentences import sentence
from tests.helpers.processes.running import ROOT

pytestmark = pytest.mark.once

_ELSEWHERE = "gs://bucket/x.json"
# TensorFlow opens them, wherever they are.
_ADDRESSES = {"bert_config_file", "init_checkpoint"}
# They name no file, but for a program, which is started or refused.
_TEXTS = {
    *("labels", "tasks", "model", "addresses", "trainer_python"),
    *("tpu_name", "tpu_zone", "gcp_project", "master"),
}


def _modules():
    """Yields the modules that read a command line by this project's parsers."""
    rooms = ("estimator_accum", "bert_finetune", "distributed", "housing_example")
    paths = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    for path in sorted([*paths, *(ROOT / "scripts").glob("*.py")]):
        text = path.read_text()
        is_program = '__name__ == "__main__"' in text
        if is_program and re.search(
            r"\b(make_parser|make_script_parser|OneSentenceParser|PROGRAM)\b", text
        ):
            yield ".".join(path.relative_to(ROOT).with_suffix("").parts)


class _Parsed(Exception):
    """The parser of a command, which is stopped before it reads a command line."""


def _parser_of(main, monkeypatch):
    def stop(parser, *_):
        raise _Parsed(parser)

    with monkeypatch.context() as patch:
        patch.setattr(command_line.OneSentenceParser, "parse_args", stop)
        with pytest.raises(_Parsed) as stopped:
            main()
    return stopped.value.args[0]


def _said_by_argparse(parser, capsys):
    """Yields each flag with a value, and the message about an address there."""
    for action in parser._actions:
        if not action.option_strings or action.nargs in (0, "..."):
            continue
        name = action.option_strings[-1].lstrip("-")
        try:
            parser.parse_known_args([f"--{name}={_ELSEWHERE}"])
        except SystemExit:
            pass
        error = capsys.readouterr().err
        yield name, error if f"`--{name}`" in error else None


def _said_by_absl(program):
    for name in program.flags():
        values = program.flags()
        try:
            values(["program", f"--{name}={_ELSEWHERE}"])
        except flags.Error as error:
            yield name, sentence(error, values)
        else:
            yield name, None


def test_no_flag_takes_an_address_for_a_folder_of_this_machine(monkeypatch, capsys):
    places, taken, modules = set(), set(), list(_modules())
    for name in modules:
        module = importlib.import_module(name)
        program = getattr(module, "PROGRAM", None)
        said = (
            _said_by_absl(program)
            if isinstance(program, Program)
            else _said_by_argparse(_parser_of(module.main, monkeypatch), capsys)
        )
        for flag, error in said:
            if error is None:
                taken.add(flag)
            elif "must be a path of this machine, without ~. Received: " in error:
                assert error.count("\n") <= 1
                places.add(flag)
    assert len(modules) > 12
    assert taken == _TEXTS | _ADDRESSES
    assert places >= {"data_dir", "vocab_file", "output_dirs", "archive", "config"}


def test_checkpoint_to_start_from_may_be_elsewhere():
    config = checkpoint.BertConfig(
        vocab_size=7, hidden_size=4, num_hidden_layers=1, num_attention_heads=1
    )
    shapes = checkpoint.encoder_shapes(config)
    arrays = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    checkpoint.write_checkpoint(arrays, "ram://bert/bert_model.ckpt")
    checkpoint.check_checkpoint("ram://bert/bert_model.ckpt", config)
    with pytest.raises(ValueError, match="There is: ram://bert/bert_model.ckpt"):
        checkpoint.check_checkpoint("ram://bert/other.ckpt", config)
    with tf.io.gfile.GFile("ram://bert/run_settings.json", "w") as file:
        file.write('{"task_name": "cola"}')
    folder.check_same("ram://bert", {"task_name": "cola"}, "")
    with pytest.raises(ValueError, match="ram://bert, which holds .* --task_name=cola"):
        folder.check_same("ram://bert", {"task_name": "sst2"}, "")
