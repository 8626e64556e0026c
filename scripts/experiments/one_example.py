"""Trains a BERT of which one example fits in memory only with recomputed layers.

    python scripts/experiments/one_example.py --output_dir=one_example

Examples of 512 tokens and a random encoder of six layers are made up. TensorFlow's
best-fit allocator, with a limit of --limit_mb on tensors, as on a GPU, runs
`estimator-accum train --micro_batch_size=auto` twice: with --recompute=none, which must
end with the sentence that one example does not fit, and with --recompute=auto, which
must train to the end. A third run, without the limit and without recomputed layers,
must end with the same weights within 1e-5. Each error takes ten seconds, which the
allocator waits. Exit codes: 0; 1 if a run ends in another way or a weight differs by
more; 2 for invalid flags.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys

if __name__ == "__main__":  # a clone runs without installation
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

from estimator_accum.runs.command_line import (
    OneSentenceParser,
    check_counts,
    exit_code_of,
)

_TOKENS, _WORDS = 512, 200
_LARGEST_DIFFERENCE = 1e-5
_ENCODER = {
    "vocab_size": _WORDS + 5,
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "max_position_embeddings": _TOKENS,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.02,
}


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line; returns the exit code."""
    parser = OneSentenceParser(__doc__)
    parser.add_argument(
        "--output_dir", required=True, type=pathlib.Path, metavar="DIR", help="new"
    )
    parser.add_numbers(
        ("limit_mb", 330, "memory for tensors [MB]"),
        ("examples", 4, "examples of an update"),
        ("updates", 3, "updates of each run"),
    )
    flags = parser.parse_args(arguments)
    return exit_code_of(lambda: _compare(flags))


def _compare(flags: argparse.Namespace) -> int:
    check_counts(flags)
    _write_inputs(flags)
    refused = _train(flags, "none", is_limited=True)
    trained = _train(flags, "auto", is_limited=True)
    plain = _train(flags, "none", is_limited=False)
    sentence = refused.stderr.splitlines()[-1] if refused.stderr else ""
    print(f"{flags.limit_mb} MB, --recompute=none: exit code {refused.returncode}")
    print(f"    {sentence.partition(': ')[2]}")
    print(f"{flags.limit_mb} MB, --recompute=auto: exit code {trained.returncode}")
    if trained.returncode or plain.returncode:
        print((trained if trained.returncode else plain).stderr, file=sys.stderr)
        return 1
    path = flags.output_dir / "auto-limited/micro_batches.json"
    if not path.exists():
        print("    the limit was never met")
        return 1
    plan = json.loads(path.read_text())
    print(f"    {json.dumps(plan)} after {flags.updates} updates")
    difference = _difference(
        flags.output_dir / "auto-limited", flags.output_dir / "none"
    )
    print(f"largest difference of a weight, to no limit: {difference:.1e}")
    is_refused = refused.returncode and "One example must fit in memory" in sentence
    is_same = difference <= _LARGEST_DIFFERENCE
    return 0 if is_refused and plan["recompute"] and is_same else 1


def _write_inputs(flags: argparse.Namespace) -> None:
    data = flags.output_dir / "data"
    data.mkdir(parents=True)
    words = [f"w{i}" for i in range(_WORDS)]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (data / "vocab.txt").write_text("\n".join([*special, *words]) + "\n")
    (data / "bert_config.json").write_text(json.dumps(_ENCODER))
    rows = []
    for i in range(flags.examples * flags.updates):
        text = " ".join(words[(i * 7 + j * j) % _WORDS] for j in range(_TOKENS))
        rows.append(f"made\t{i % 2}\t\t{text}")
    (data / "train.tsv").write_text("\n".join(rows) + "\n")


def _train(flags: argparse.Namespace, recompute: str, *, is_limited: bool):
    """Trains in a process of its own; returns it, ended."""
    environment = os.environ | {"TF_ENABLE_ONEDNN_OPTS": "0"}
    folder = recompute
    if is_limited:
        folder += "-limited"
        environment |= {
            "TF_CPU_ALLOCATOR_USE_BFC": "true",
            "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(flags.limit_mb),
        }
    data = flags.output_dir / "data"
    command = [
        *(sys.executable, "-m", "bert_finetune.run_classifier"),
        *("--task_name=CoLA", "--do_train=true", "--dropout=false", "--seed=1"),
        f"--data_dir={data}",
        f"--vocab_file={data / 'vocab.txt'}",
        f"--bert_config_file={data / 'bert_config.json'}",
        f"--max_seq_length={_TOKENS}",
        f"--effective_batch_size={flags.examples}",
        "--micro_batch_size=auto",
        "--num_train_epochs=1",
        f"--recompute={recompute}",
        f"--output_dir={flags.output_dir / folder}",
    ]
    print(f"==> {folder}", file=sys.stderr, flush=True)
    root = pathlib.Path(__file__).resolve().parents[2]
    environment["PYTHONPATH"] = str(root)
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False
    )


def _difference(ours: pathlib.Path, theirs: pathlib.Path) -> float:
    """Returns the largest difference of a variable in two folders' checkpoints."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import numpy as np
    import tensorflow as tf

    readers = [
        tf.train.load_checkpoint(tf.train.latest_checkpoint(str(folder)))
        for folder in (ours, theirs)
    ]
    names = readers[1].get_variable_to_shape_map()
    return max(
        float(np.max(np.abs(readers[0].get_tensor(name) - readers[1].get_tensor(name))))
        for name in names
    )


if __name__ == "__main__":
    sys.exit(main())
