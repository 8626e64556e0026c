"""Flags that do not fit: exit code 2 and a sentence, of every script that measures."""

import importlib
import re

import pytest


@pytest.mark.parametrize(
    ("script", "flags", "sentence"),
    [
        ("benchmark", "--parts=cola", "--cola_dir must name the folder"),
        ("benchmark", "--rounds=0", "Try --help"),
        ("benchmark", "--sizes=huge", "Try --help"),
        ("benchmark", "--parts=speed", "Try --help"),
        (
            "fetch_mnist",
            "--base_url=ftp://a",
            "`--base_url` must be an http.*'ftp://a'",
        ),
        ("fetch_mnist", "", r"`--data_dir` must name a folder\. Received: nothing\. "),
        ("growing_sequences", "", "--output_dir must name a folder"),
        ("growing_sequences", "--lengths=16", "be tokens:updates, .*Received: '16'"),
        ("growing_sequences", "--lengths=0:3", "be tokens:updates, .*Received: '0:3'"),
        ("keras_table", "--optimizers=Adam,Best", "be among SGD.*: Best. Leave"),
        (
            "keras_table",
            "--updates=0",
            "`--updates` must be an integer >= 1. Rec.*: 0. ",
        ),
        (
            "kill_tasks",
            "--kills=0",
            "`--kills` must be .* >= 1 and at most three quart",
        ),
        ("kill_tasks", "--train_updates=4", "Received: 20. Use more updates."),
        (
            "kill_tasks",
            "--output_dir=/",
            "`--output_dir` must be new or empty. Rec.*: /",
        ),
        ("memory_table", "", "--output_dir must name a folder"),
        ("memory_table", "--updates=0", "must be an integer >= 1. Received: '0'."),
        (
            "network_bench",
            "--updates=0",
            "`--updates` must be an .* >= 1. Received: 0.",
        ),
        (
            "network_bench",
            "--effective_batch_size=100",
            "multiple of 16. Received: 100.",
        ),
        (
            "network_bytes",
            "--updates=0",
            "`--updates` must be an .* >= 1. Received: 0.",
        ),
        (
            "network_bytes",
            "--effective_batch_size=100",
            r"multiple of K \* 2 workers. Received: 100 with K=8. Use 160.",
        ),
        ("optimizer_table", "--optimizers=Adam,Lion", r"of Adadelta.*: Lion\. Leave"),
        (
            "optimizer_table",
            "--updates=0",
            r"must be >= 1\. Received: 0\. Leave it out",
        ),
        ("plan_table", "--shapes=8", "be examples x tokens, .* 8x128. Received: '8'"),
    ],
)
def test_flag_that_does_not_fit_is_refused(
    script, flags, sentence, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    try:
        code = importlib.import_module(f"scripts.{script}").main(flags.split())
    except SystemExit as left:
        code = left.code
    assert code == 2
    stderr = capsys.readouterr().err
    assert re.search(sentence, stderr)
    assert stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
