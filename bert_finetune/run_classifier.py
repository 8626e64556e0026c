r"""Fine-tunes BERT on a GLUE task or your own data, with gradient accumulation.

The flags are those of google-research/bert's `run_classifier.py`, plus
`--gradient_accumulation_steps`: 8 x 4 trains like 32, in the memory of 8.

    estimator-accum train --task_name=CoLA --do_train=true \
        --do_eval=true --data_dir=glue/CoLA --vocab_file=bert/MODEL/vocab.txt \
        --bert_config_file=bert/MODEL/bert_config.json \
        --init_checkpoint=bert/MODEL/bert_model.ckpt --max_seq_length=128 \
        --train_batch_size=8 --gradient_accumulation_steps=4 --output_dir=cola_output

Without sizes, an update is 32 examples in one micro-batch. A stopped run resumes from its
last checkpoint when it is started again with the same flags.
"""

import pathlib
import sys

if __name__ == "__main__":  # also runs from a clone that is not installed
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

from bert_finetune.settings import Settings
from estimator_accum.programs.program import Program

PROGRAM = Program(
    name="estimator-accum train",
    description=__doc__,
    settings=Settings,
    advice="Use a lower --learning_rate, and another --output_dir.",
)
main = PROGRAM.run

if __name__ == "__main__":
    main(sys.argv)
