"""OpenNMT/OpenNMT-tf 1, its Runner with a small Transformer: means over words."""

import bench
import made_data
import removed
import tensorflow as tf

v1 = tf.compat.v1

output_dir = bench.begin()
removed.add_estimator("util")
v1.nest.is_sequence = v1.nest.is_nested

import opennmt
from opennmt.runner import Runner

text, vocabulary = made_data.write_text(output_dir)
model = opennmt.models.Transformer(
    opennmt.inputters.WordEmbedder("source_vocabulary", embedding_size=16),
    opennmt.inputters.WordEmbedder("target_vocabulary", embedding_size=16),
    num_layers=1,
    num_units=16,
    num_heads=2,
    ffn_inner_dim=32,
    dropout=0.0,
    attention_dropout=0.0,
    relu_dropout=0.0,
)
model.daisy_chain_variables = False  # copies between devices, of which there is one
config = {
    "model_dir": str(output_dir),
    "data": {
        "train_features_file": text,
        "train_labels_file": text,
        "source_vocabulary": vocabulary,
        "target_vocabulary": vocabulary,
    },
    "params": {
        "optimizer": "AdamOptimizer",
        "learning_rate": 0.2,
        "clip_gradients": 1.0,
        "decay_type": "noam_decay_v2",
        "decay_params": {"model_dim": 16, "warmup_steps": 10},
        "average_loss_in_time": True,
        "label_smoothing": 0.1,
    },
    "train": {
        "batch_size": bench.BATCH,
        "train_steps": bench.UPDATES,
        "sample_buffer_size": 100,
        "bucket_width": None,  # all batches are of one size
    },
}
Runner(model, config, seed=1).train()
