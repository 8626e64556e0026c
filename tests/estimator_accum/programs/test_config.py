"""Flags of a run in a file, and a program that reads them back."""

import dataclasses
import json
import pathlib
import re

import pytest
from absl import flags

from bert_finetune import run_classifier
from distributed import command_line
from estimator_accum.programs.config import config_text, define_config_flags, flags_of
from estimator_accum.programs.program import read_flags, sentence
from housing_example import main as housing
from tests.helpers.models import tiny_bert

_ROOMS = {
    "bert_finetune": (
        run_classifier.FLAGS,
        run_classifier.settings_from_flags,
        [
            f"--{name}={value}"
            for name, value in tiny_bert.command_line(
                *map(pathlib.Path, ("bert", "cola", "old"))
            ).items()
        ]
        + ["--clip_norm=0", "--nodropout", "--learning_rate=1e-4", "--seed=7"],
    ),
    "housing_example": (
        housing.FLAGS,
        housing.settings_from_flags,
        ["--train_csv=a.csv", "--noshuffle", "--train_updates=9", "--output_dir=old"],
    ),
    "distributed": (
        command_line.FLAGS,
        command_line.settings_from_flags,
        ["--data_dir=mnist", "--log_examples", "--seed=8", "--output_dir=old"],
    ),
}
_PATHS = ("data_dir", "vocab_file", "bert_config_file", "init_checkpoint", "train_csv")


def _reset(values: flags.FlagValues) -> None:
    values.unparse_flags()
    for name in values:
        values[name].unparse()


@pytest.fixture(params=_ROOMS)
def room(request):
    values, settings_from_flags, given = _ROOMS[request.param]
    yield request.param, values, settings_from_flags, given
    _reset(values)


@pytest.mark.parametrize("sizes", [[], ["--micro_batch_size=auto"]])
def test_a_program_reads_its_own_settings_back(room, sizes, tmp_path, monkeypatch):
    name, values, settings_from_flags, given = room
    monkeypatch.chdir(tmp_path)
    read_flags(values, ["program", *given, *sizes])
    first = settings_from_flags()
    module = __import__(f"{name}.settings", fromlist=["flags_of"])
    (tmp_path / "config.json").write_text(config_text(module.flags_of(first)))
    _reset(values)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    config = tmp_path / "config.json"
    read_flags(values, ["program", f"--config={config}", "--output_dir=new"])
    second = settings_from_flags()
    there = {
        field: str(tmp_path / path)
        for field, path in dataclasses.asdict(first).items()
        if field in _PATHS and path
    }
    assert there and second == dataclasses.replace(first, output_dir="new", **there)


@pytest.fixture
def toy() -> flags.FlagValues:
    values = flags.FlagValues()
    for name in ("micro_batch_size", "train_batch_size", "seed"):
        flags.DEFINE_integer(name, None, "", flag_values=values)
    define_config_flags(values)
    return values


def _read(toy, tmp_path, content, *arguments):
    (tmp_path / "config.json").write_text(content)
    read_flags(toy, ["program", f"--config={tmp_path / 'config.json'}", *arguments])
    return toy.train_batch_size, toy.micro_batch_size, toy.seed


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ([], (8, None, 1)),
        (["--seed=2"], (8, None, 2)),
        (["--micro_batch_size=4"], (None, 4, 1)),
        (["--train_batch_size=4"], (4, None, 1)),
    ],
)
def test_the_command_line_wins(toy, tmp_path, arguments, expected):
    content = config_text({"train_batch_size": 8, "seed": 1})
    assert _read(toy, tmp_path, content, *arguments) == expected


@pytest.mark.parametrize(
    "content, expected",
    [
        (
            "{",
            r"`--config` must be what a run has written. Received: .*config.json, a f",
        ),
        ("[]", r"`--config` must be what a run has written"),
        (
            "{}",
            r"`--config` must hold the flags of a run. Received: .*, without 'flags'",
        ),
        (json.dumps({"flags": 1}), r"`--config` must hold the flags of a run"),
        (
            config_text({"sede": 1}),
            r"must hold flags of this program. .* with 'sede'. S",
        ),
        (config_text({"seed": "x"}), r"`--seed` must be an integer. Received: 'x'"),
    ],
)
def test_a_file_that_does_not_fit_is_one_sentence(toy, tmp_path, content, expected):
    with pytest.raises((ValueError, flags.Error)) as raised:
        _read(toy, tmp_path, content)
    assert re.search(expected, sentence(raised.value, toy))


def test_a_missing_file_is_named(toy):
    with pytest.raises(ValueError, match="`--config` must be .*none.json, a file that"):
        read_flags(toy, ["program", "--config=none.json"])


def test_remote_paths_stay_as_they_are():
    @dataclasses.dataclass
    class Settings:
        output_dir: str = "out"
        data_dir: str = "gs://bucket/data"
        seed: int | None = None

    assert flags_of(Settings(), ["data_dir"]) == {"data_dir": "gs://bucket/data"}
