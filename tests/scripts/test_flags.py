"""Invalid flags of every script: exit code 2 and one sentence."""

import importlib
import re

import pytest

_ROOMS = {
    "scripts": ("benchmark", "fetch_mnist", "quickstart_demo"),
    "scripts.experiments": (
        *("compare_batches", "disturb_runs", "optimizer_table", "public_scripts"),
    ),
    "bert_finetune": ("fetch_bert", "fetch_glue", "import_hf_checkpoint"),
    "estimator_accum.runs": ("plot_loss",),
}
_COMPARE = "compare_batches --data_dir=x --bert_dir=y --output_dir=output"
_GLUE = "fetch_glue --data_dir=new"
_PLOT = "plot_loss --output_dirs=a,b"


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("benchmark --parts=cola", "`--cola_dir` must name the folder"),
        ("benchmark --rounds=0", "Try --help"),
        ("benchmark --sizes=huge", "Try --help"),
        (f"{_COMPARE} --gradient_accumulation_steps=0", "s` must be .* >= 1. R.*: 0"),
        (f"{_COMPARE} --micro_batch_size=-1", "`--micro_batch_size` must be .* >= 1"),
        (f"{_COMPARE} --updates=0", "`--updates` must be an integer >= 1. R.*: 0. See"),
        (f"{_COMPARE} --updates=x", "--updates: invalid int value: 'x'. Try --help"),
        (_COMPARE, "`--data_dir` must hold train.tsv of CoLA. Received"),
        (f"{_COMPARE} --task_name=colla", "`--task_name` must be one of CoLA, .*: 'co"),
        (f"{_COMPARE} --output_dir=full", "must be a new or empty folder. R.*: full."),
        (f"{_COMPARE} --output_dir=full/file", "new or empty folder. Received: full/f"),
        ("disturb_runs --output_dir=full --signals=1", "must be new"),
        ("disturb_runs", "must be new, and `--signals` or `--full_disks` above 0"),
        ("fetch_bert", "`--model` must be a .* name. Received: nothing. Use --list"),
        ("fetch_bert --model=a/b/c --output_dir=new", "`--model` must be a .*: a/b/c,"),
        (
            "fetch_bert --model=b --output_dir=new --archive=c",
            "`--archive` .*ived: b. ",
        ),
        ("fetch_bert --model=uncased_L-2_H-128_A-2", "`--output_dir` must name a fold"),
        ("fetch_glue --tasks=CoLA", "`--data_dir` must name a folder. Rec.*: nothing"),
        ("fetch_glue --tasks=CoLA --data_dir=full/file", ".*file.*': Not a directory"),
        ("fetch_glue --tasks=sts-b", "`--tasks` must be one of CoLA, .*: 'sts-b'."),
        (f"{_GLUE} --archive=a.zip", "`--archive` must be for one task. R.*: 8 tasks"),
        (f"{_GLUE} --tasks=CoLA --archive=no.zip", "an existing file. .*: no.zip."),
        ("fetch_glue --base_url=ftp://a", "`--base_url` must be an http.*'ftp:"),
        ("fetch_mnist --base_url=ftp://a", "`--base_url` must be an http.*'ftp://a'"),
        ("fetch_mnist", "`--data_dir` must name a folder. Received: nothing. "),
        ("import_hf_checkpoint --input_dir=x", "required: --output_dir"),
        ("optimizer_table --optimizers=Adam,Lion", "Ada.*: Lion. L"),
        (f"{_PLOT} --plot=a.png --labels=one", "`--labels` must hold .*: 1 for 2"),
        (f"{_PLOT} --plot=a.jpeg2000", "`--plot` must end in .png, .svg or .pdf. Rec"),
        (f"{_PLOT} --plott=a.png", "--plot"),
        ("plot_loss --output_dirs=a, --plot=a.png", "names separated by single commas"),
        (
            "quickstart_demo --output_dir=full/file",
            "demo before. .* full/file, a file.",
        ),
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
