"""google-research/electra's run_finetuning.py, as aub-mind/arabert publishes it.

AdamWeightDecay with a rate for each layer. The package lacks the modules of its tasks;
the task here takes their place.
"""

import importlib.util
import pathlib
import sys
import types

import bench
import made_data
import tensorflow as tf

v1 = tf.compat.v1
_HPARAMS = {
    "do_lower_case": True,
    "embedding_size": 16,
    "init_checkpoint": None,
    "learning_rate": 1e-3,
    "max_seq_length": made_data.TOKENS,
    "model_hparam_overrides": {
        "attention_probs_dropout_prob": 0.0,
        "hidden_dropout_prob": 0.0,
        "hidden_size": 32,
        "max_position_embeddings": made_data.TOKENS,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
    },
    "task_names": ["made"],
    "use_tfrecords_if_existing": False,
    "vocab_size": 105,
}


class Task:
    """Classification of a sentence, on the model's first token."""

    name = "made"

    def get_prediction_module(self, bert_model, features, is_training, percent_done):
        """Returns losses [B], and outputs."""
        del is_training, percent_done
        logits = v1.layers.dense(bert_model.get_pooled_output(), 2)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
            labels=features["label"], logits=logits
        )
        return losses, {"loss": losses, "logits": logits}


output_dir = bench.begin()
for kind in ("classification", "qa", "tagging"):
    name = f"finetune.{kind}.{kind}_tasks"
    package, module = types.ModuleType(f"finetune.{kind}"), types.ModuleType(name)
    setattr(package, f"{kind}_tasks", module)
    sys.modules |= {package.__name__: package, name: module}
arabert = importlib.util.find_spec("arabert").submodule_search_locations[0]
sys.path.insert(0, str(pathlib.Path(arabert) / "araelectra"))

import configure_finetuning
import run_finetuning

config = configure_finetuning.FinetuningConfig("made", str(output_dir), **_HPARAMS)
estimator = v1.estimator.tpu.TPUEstimator(
    use_tpu=False,
    model_fn=run_finetuning.model_fn_builder(config, [Task()], bench.UPDATES),
    config=v1.estimator.tpu.RunConfig(model_dir=str(output_dir)),
    train_batch_size=bench.BATCH,
)
estimator.train(made_data.classification, max_steps=bench.UPDATES)
