"""Invalid flags of every script: exit code 2 and one sentence."""

import importlib
import re

import pytest

_COMPARE = "compare_batches --data_dir=x --bert_dir=y --output_dir=output"
_GLUE = "fetch_glue --data_dir=new"
_PLOT = "plot_loss --output_dirs=a,b"


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("benchmark --parts=cola", "--cola_dir must name the folder"),
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
        ("four_runs --updates=3", "Try --help"),
        ("growing_sequences", "--output_dir must name a folder"),
        ("growing_sequences --lengths=16", "be tokens:updates, .*Received: '16'"),
        ("growing_sequences --lengths=0:3", "be tokens:updates, .*Received: '0:3'"),
        ("import_hf_checkpoint --input_dir=x", "required: --output_dir"),
        ("keras_table --optimizers=Adam,Best", "be among SGD.*: Best. Leave"),
        ("keras_table --updates=0", "`--updates` must be an integer >= 1. Rec.*: 0. "),
        ("kill_tasks --kills=0", "`--kills` must be .* >= 1 and at most three quart"),
        ("kill_tasks --train_updates=4", "Received: 20. Use more updates."),
        ("kill_tasks --output_dir=/", "`--output_dir` must be new or empty. Rec.*: /"),
        (
            "make_demo_data --output_dir=full",
            "`--output_dir` must not exist. Received: ",
        ),
        (
            "make_demo_data --output_dir=new --seed=-1",
            "`--seed` must be an integer from",
        ),
        ("make_demo_data", "the following arguments are required: --output_dir"),
        ("memory_table", "--output_dir must name a folder"),
        ("memory_table --updates=0", "must be an integer >= 1. Received: '0'."),
        ("network_bench --updates=0", "`--updates` must be an .* >= 1. Received: 0."),
        ("network_bench --effective_batch_size=100", "multiple of 16. Received: 100."),
        ("network_bytes --updates=0", "`--updates` must be an .* >= 1. Received: 0."),
        ("network_bytes --effective_batch_size=100", "100 with K=8. Use 160."),
        ("network_table --num_parameters=-5", "`--num_parameters` must .* > 0. .*-5"),
        ("network_table --micro_step_secs=0", "`--micro_step_secs` must .* > 0. .*0."),
        ("network_table --share=inf", "`--share` must be a number > 0. Received: inf."),
        ("optimizer_table --optimizers=Adam,Lion", "of Adadelta.*: Lion. Leave"),
        ("optimizer_table --updates=0", "must be >= 1. Received: 0. Leave it out"),
        ("plan_table --shapes=8", "be examples x tokens, .* 8x128. Received: '8'"),
        (f"{_PLOT} --plot=a.png --labels=one", "`--labels` must hold .*: 1 for 2"),
        (f"{_PLOT} --plot=a.jpeg2000", "`--plot` must end in .png, .svg or .pdf. Rec"),
        (f"{_PLOT} --plott=a.png", "--plot"),
        ("plot_loss --output_dirs=a, --plot=a.png", "names separated by single commas"),
        (
            "benchmarks.recompute_table --cases huge",
            "must begin with one of tiny, .*'huge'",
        ),
        (
            "benchmarks.recompute_table --rounds=0",
            "`--rounds` must be .* >= 1. Re.*: 0",
        ),
        ("quickstart_demo --output_dir=full/file", "a folder. .* full/file, a file."),
        ("quickstart_demo --output_dir=full", ": full with file. Name another."),
        ("experiments.disturb_evaluation --errors=0", "`--errors` must be .* >= 1. R"),
        (
            "experiments.public_scripts --work_dir=new --errors=0",
            "from 1 to 80 for each of .* Received: 0, and 4 of them. Use 200",
        ),
    ],
)
def test_unfit_flag_is_refused(command, sentence, tmp_path, monkeypatch, refusal):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    script, *flags = command.split()
    main = importlib.import_module(f"scripts.{script}").main
    assert re.search(sentence, refusal(main, *flags))
