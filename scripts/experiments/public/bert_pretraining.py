"""google-research/bert, run_pretraining.py: two means, one over masked words."""

import bench
import made_data

output_dir = bench.begin()
bench.run_module(
    "bert.run_pretraining",
    "--do_train=true",
    f"--input_file={made_data.write_pretraining(output_dir)}",
    f"--bert_config_file={made_data.write_bert_config(output_dir)}",
    f"--max_seq_length={made_data.TOKENS}",
    f"--max_predictions_per_seq={made_data.MASKED}",
    f"--train_batch_size={bench.BATCH}",
    f"--num_train_steps={bench.UPDATES}",
    "--num_warmup_steps=2",
    "--learning_rate=1e-3",
    f"--output_dir={output_dir}",
)
