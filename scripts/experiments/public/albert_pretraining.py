"""google-research/albert, run_pretraining.py's model_fn: LAMB, shared layers.

The package has lost the script's flags and its last lines; they are here.
"""

import bench
import made_data
import tensorflow as tf
from albert import modeling, run_pretraining

v1 = tf.compat.v1
output_dir = bench.begin()
v1.flags.DEFINE_integer("masked_lm_budget", 0, "")
v1.flags.FLAGS(["albert_pretraining"])
config = modeling.AlbertConfig.from_json_file(made_data.write_albert_config(output_dir))
model_fn = run_pretraining.model_fn_builder(
    albert_config=config,
    init_checkpoint=None,
    learning_rate=1e-2,
    num_train_steps=bench.UPDATES,
    num_warmup_steps=2,
    use_tpu=False,
    use_one_hot_embeddings=False,
    optimizer="lamb",
    poly_power=1.0,
    start_warmup_step=0,
)
input_fn = run_pretraining.input_fn_builder(
    input_files=[str(made_data.write_pretraining(output_dir))],
    max_seq_length=made_data.TOKENS,
    max_predictions_per_seq=made_data.MASKED,
    is_training=True,
)
estimator = v1.estimator.tpu.TPUEstimator(
    use_tpu=False,
    model_fn=model_fn,
    config=v1.estimator.tpu.RunConfig(model_dir=str(output_dir)),
    train_batch_size=bench.BATCH,
)
estimator.train(input_fn, max_steps=bench.UPDATES)
