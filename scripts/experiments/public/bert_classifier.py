"""google-research/bert, run_classifier.py: AdamWeightDecay, clipping by global norm."""

import bench
import made_data

output_dir = bench.begin()
bench.without_dropout()  # of the classifier, which no flag turns off
made_data.write_cola(output_dir / "cola")
bench.run_module(
    "bert.run_classifier",
    "--task_name=CoLA",
    "--do_train=true",
    f"--data_dir={output_dir / 'cola'}",
    f"--vocab_file={made_data.write_vocabulary(output_dir)}",
    f"--bert_config_file={made_data.write_bert_config(output_dir)}",
    "--max_seq_length=16",
    f"--train_batch_size={bench.BATCH}",
    "--num_train_epochs=1",
    "--learning_rate=1e-3",
    f"--output_dir={output_dir}",
)
