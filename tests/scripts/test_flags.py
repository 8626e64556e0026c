"""Invalid flags of every script: exit code 2 with one sentence."""

import importlib
import re

import pytest

pytestmark = pytest.mark.once

_ROOMS = {
    "scripts": ("benchmark", "quickstart_demo"),
    "scripts.experiments": (
        *("compare_batches", "disturb_runs", "memory_table", "optimizer_table"),
        *("public_scripts", "share_table"),
    ),
}
_COMPARE = "compare_batches --data_dir=x --bert_dir=y --output_dir=output"


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("benchmark --parts=cola", "`--cola_dir` must name the folder"),
        ("benchmark --rounds=0", "See --help"),
        ("benchmark --sizes=huge", "See --help"),
        (f"{_COMPARE} --gradient_accumulation_steps=0", "s` must be .* >= 1. R.*: 0"),
        (f"{_COMPARE} --micro_batch_size=-1", "`--micro_batch_size` must be .* >= 1"),
        (f"{_COMPARE} --updates=0", "`--updates` must be an integer >= 1. R.*: 0. See"),
        (f"{_COMPARE} --updates=x", "`--updates` must be an integer. Received: 'x'. S"),
        (_COMPARE, "`--data_dir` must hold train.tsv of CoLA. Received"),
        (f"{_COMPARE} --task_name=colla", "`--task_name` must be one of CoLA, .*: 'co"),
        (f"{_COMPARE} --output_dir=full", "must be a new or empty folder. R.*: full."),
        (f"{_COMPARE} --output_dir=full/file", "new or empty folder. Received: full/f"),
        ("disturb_runs --output_dir=full --signals=1", "must be new"),
        ("disturb_runs", "must be new, and `--signals` or `--full_disks` above 0"),
        ("memory_table --models=huge", "`--models` must be one of .* Received: 'huge'"),
        ("optimizer_table --optimizers=Adam,Lion", "Ada.*: Lion. L"),
        ("share_table --models=tagger,huge", "be among DNNC.* Received: tagger, huge"),
        ("quickstart_demo --output_dir=full/file", "demo before. .* full/file, a file"),
        ("quickstart_demo --output_dir=full", ": full with file. Name another."),
        (
            "public_scripts --work_dir=new --errors=0",
            "from 1 to 80 for each of .* Received: 0, and 4 of them. Use 200",
        ),
    ],
)
def test_unfit_flag_is_refused(command, sentence, tmp_path, monkeypatch, refusal):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    program, *flags = command.split()
    (room,) = (room for room, programs in _ROOMS.items() if program in programs)
    main = importlib.import_module(f"{room}.{program}").main
    assert re.search(sentence, refusal(main, *flags))
