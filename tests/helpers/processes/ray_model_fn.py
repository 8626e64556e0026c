"""A model_fn on two of Ray's workers, trained as docs/clusters.md says through a kill.

    python ray_model_fn.py FOLDER

The checkpoints are in FOLDER/run. Worker 1 is killed in the window behind the first of
them. Prints the metrics of Ray's result, and the path of its checkpoint, as JSON.
"""

import json
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

UPDATES, K, BATCH = 6, 2, 8


def model_fn(features, labels, mode):
    """A linear regression; the window has K micro-batches."""
    import tensorflow as tf

    from estimator_accum import make_accumulating_train_op, make_accumulation_hooks

    # Random initial values differ between processes, with tf_random_seed too.
    outputs = tf.compat.v1.layers.dense(features, 1, kernel_initializer="zeros")
    loss = tf.compat.v1.losses.mean_squared_error(labels, outputs)
    optimizer = tf.compat.v1.train.AdamOptimizer(0.1)
    train_op = make_accumulating_train_op(loss, optimizer, K)
    return tf.estimator.EstimatorSpec(
        mode, loss=loss, train_op=train_op, training_hooks=make_accumulation_hooks()
    )


def input_fn(input_context=None):
    """The worker's examples: 4 batches, again and again."""
    import numpy as np
    import tensorflow as tf

    random = np.random.default_rng(0)
    x = random.normal(size=[64, 3]).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).repeat()
    if input_context is not None:
        data = data.shard(
            input_context.num_input_pipelines, input_context.input_pipeline_id
        )
    return data.batch(BATCH)


def train_and_die(config) -> None:
    """Trains as one of Ray's workers."""
    import os
    import pathlib

    import ray.train
    import tensorflow as tf

    from distributed.ray_worker import RayReport
    from estimator_accum.compat import enable_estimator

    enable_estimator()
    folder = pathlib.Path(config["folder"])
    death = folder / "death"

    class Dying(tf.compat.v1.train.SessionRunHook):
        runs = 0

        def before_run(self, run_context):
            self.runs += 1
            rank = ray.train.get_context().get_world_rank()
            if rank == 1 and self.runs == 3 * K and not death.exists():
                death.touch()
                os.kill(os.getpid(), 9)

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    run_config = tf.estimator.RunConfig(
        str(folder / "run"),
        train_distribute=strategy,
        save_checkpoints_steps=2 * K,  # a pass through the worker's examples
    )
    estimator = tf.estimator.Estimator(model_fn, config=run_config)
    report = RayReport()
    hooks = [report, Dying()]
    train_spec = tf.estimator.TrainSpec(input_fn, max_steps=UPDATES * K, hooks=hooks)
    eval_spec = tf.estimator.EvalSpec(input_fn)  # for an evaluator; Ray has none
    tf.estimator.train_and_evaluate(estimator, train_spec, eval_spec)
    report.send(path=estimator.latest_checkpoint())


if __name__ == "__main__":
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.tensorflow import TensorflowTrainer

    from distributed.ray_worker import WatchedConfig

    folder = pathlib.Path(sys.argv[1])
    root = str(pathlib.Path(__file__).resolve().parents[3])
    os.environ["PYTHONPATH"] = root
    result = TensorflowTrainer(
        train_and_die,
        train_loop_config={"folder": str(folder)},
        tensorflow_config=WatchedConfig(),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="ray",
            storage_path=str(folder),
            failure_config=FailureConfig(max_failures=1),
        ),
    ).fit()
    print(json.dumps({"metrics": result.metrics, "path": result.checkpoint.path}))
