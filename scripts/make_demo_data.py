"""Generates a small BERT checkpoint and a corpus in CoLA's layout to fine-tune it on.

    python scripts/make_demo_data.py --output_dir demo/data

creates train.tsv, dev.tsv and test.tsv (grammatical and ungrammatical sentences of a
small English grammar, see bert_finetune/demo_grammar.py), vocab.txt, bert_config.json
and bert_model.ckpt. The checkpoint is pre-trained here, by masked language modelling on
sentences that are in none of the three files: ten to thirty seconds on 2 cores. The
same --seed writes the same sentences on every machine.
"""

import dataclasses
import json
import pathlib
import sys

from bert_finetune.demo_grammar import (
    SPECIAL_TOKENS,
    Corpus,
    Sentence,
    make_corpus,
    vocabulary,
)
from bert_finetune.download import staging_folder
from estimator_accum.runs.command_line import OneSentenceParser, exit_code_of
from estimator_accum.runs.program import quiet_import

with quiet_import(sys.argv[1:]):
    from bert_finetune.masked_lm import pretrain
    from bert_finetune.modeling import BertConfig
    from bert_finetune.tokenization import WordPieceTokenizer

SIZES = {"num_train": 3200, "num_dev": 500, "num_test": 250, "num_unlabelled": 20000}
MAX_SEQ_LENGTH = 32
PRETRAINING = {"num_updates": 2500, "batch_size": 64, "peak_learning_rate": 3e-3}


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line; returns the exit code."""
    parser = OneSentenceParser(__doc__)
    parser.add_folder(
        "output_dir", "the folder to make; it must not exist", required=True
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of sentences and weights (default: 0)"
    )
    flags = parser.parse_args(arguments)
    return exit_code_of(lambda: make_demo_data(flags.output_dir, flags.seed))


def make_demo_data(output_dir: pathlib.Path, seed: int) -> None:
    """Creates the folder, complete or not at all.

    Args:
        output_dir: A folder that does not exist yet.
        seed: Random seed of sentences and weights, 0 <= seed < 2**32.

    Raises:
        ValueError: If the folder exists, or the seed is out of range.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(
            f"`--seed` must be an integer from 0 to 2**32 - 1. Received: {seed}. Use 0."
        )
    if output_dir.exists():
        raise ValueError(
            f"`--output_dir` must not exist. Received: {output_dir}. "
            "Remove it, or name another."
        )
    corpus = make_corpus(seed, **SIZES)
    with staging_folder(output_dir) as staging:
        content = staging / "content"
        write_corpus(content, corpus)
        loss = _write_checkpoint(content, corpus, seed)
    print(
        f"{output_dir}: {len(corpus.train):,} training sentences, {len(corpus.dev)} dev "
        f"sentences; bert_model.ckpt, pre-trained to {loss:.2f} nats per masked token"
    )


def write_corpus(folder: pathlib.Path, corpus: Corpus) -> None:
    """Writes train.tsv, dev.tsv, test.tsv in GLUE's layout of CoLA, and vocab.txt."""
    _write_lines(folder / "train.tsv", map(_labelled_line, corpus.train))
    _write_lines(folder / "dev.tsv", map(_labelled_line, corpus.dev))
    rows = (f"{index}\t{row.text}" for index, row in enumerate(corpus.test))
    _write_lines(folder / "test.tsv", ["index\tsentence", *rows])
    _write_lines(folder / "vocab.txt", vocabulary())


def _labelled_line(sentence: Sentence) -> str:
    label, mark = ("1", "") if sentence.is_acceptable else ("0", "*")
    return f"{sentence.source}\t{label}\t{mark}\t{sentence.text}"


def _write_lines(path: pathlib.Path, lines) -> None:
    path.write_text(
        "".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n"
    )


def _write_checkpoint(folder: pathlib.Path, corpus: Corpus, seed: int) -> float:
    tokens = vocabulary()
    config = BertConfig(
        vocab_size=len(tokens),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=256,
        # The two runs of the demo are compared number by number.
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=MAX_SEQ_LENGTH,
        # Wider than BERT's 0.02, for 64 numbers a token and a tenth of the updates.
        initializer_range=0.1,
    )
    text = json.dumps(dataclasses.asdict(config), indent=2)
    (folder / "bert_config.json").write_text(f"{text}\n", encoding="utf-8")
    tokenizer = WordPieceTokenizer(folder / "vocab.txt", do_lower_case=True)
    encodings = tokenizer.encode_batch(corpus.unlabelled, None, MAX_SEQ_LENGTH)
    return pretrain(
        config,
        [encoding.input_ids for encoding in encodings],
        folder / "bert_model.ckpt",
        special_ids=[tokens.index(token) for token in SPECIAL_TOKENS],
        pad_id=tokenizer.pad_id,
        mask_id=tokens.index("[MASK]"),
        seed=seed,
        **PRETRAINING,
    )


if __name__ == "__main__":
    sys.exit(main())
