"""Converts a Hugging Face folder to a checkpoint for `estimator-accum train`.

    estimator-accum import --input_dir hugging_face --output_dir bert

reads config.json, vocab.txt or tokenizer.json, and model.safetensors, and writes
bert_model.ckpt, bert_config.json and vocab.txt. The model is a BERT, a DistilBERT, or a
base or large ELECTRA. A model without a pooler gets an untrained one. The folder appears
only when it is complete. Exit codes: 0; 2 with one sentence if the input is invalid or the
output folder is not empty.
"""

import pathlib
import sys

from estimator_accum.programs.command_line import OneSentenceParser, exit_code_of


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line; returns the exit code."""
    parser = OneSentenceParser(__doc__, prog="estimator-accum import")
    parser.add_folder(
        "input_dir",
        "folder with config.json, vocab.txt or tokenizer.json, and model.safetensors of "
        "a BERT",
        required=True,
    )
    parser.add_folder(
        "output_dir", "folder to make; may exist if it is empty", required=True
    )
    flags = parser.parse_args(arguments)
    return exit_code_of(lambda: _import(flags.input_dir, flags.output_dir), parser.prog)


def _import(input_dir: pathlib.Path, output_dir: pathlib.Path) -> None:
    from bert_finetune.hf_import import import_checkpoint

    summary = import_checkpoint(input_dir, output_dir)
    print(
        f"{output_dir}: bert_model.ckpt ({summary.num_variables} variables, "
        f"{summary.config.num_hidden_layers} layers), bert_config.json, vocab.txt"
    )
    for line in summary.warnings:
        print(line)


if __name__ == "__main__":
    sys.exit(main())
