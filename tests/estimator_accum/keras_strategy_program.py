"""Trains one Keras model in `fit` under a strategy; run by test_keras_strategies.py.

usage: keras_strategy_program.py ROOT KIND STRATEGY MODEL OUTPUT

STRATEGY is "mirrored" (two logical CPUs), "workers" (one task of TF_CONFIG) or "none",
with the joined batches. OUTPUT.npz takes the weights; the micro-steps, updates and the
reductions of the traced training step are printed as one JSON line.
"""

import json
import sys

import numpy as np
import tensorflow as tf


def main() -> None:
    root, kind_name, strategy_name, model_name, output, *options = sys.argv[1:]
    cpus = tf.config.list_physical_devices("CPU")
    if strategy_name == "mirrored":
        tf.config.set_logical_device_configuration(
            cpus[0], [tf.config.LogicalDeviceConfiguration()] * 2
        )
        strategy = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    elif strategy_name == "workers":
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    else:
        strategy = tf.distribute.get_strategy()
    from keras_kinds import Kind, dense_data, sparse_data

    from estimator_accum.keras import AccumulationCallback, accumulate

    rows = _record_reductions()
    kind = Kind(root, kind_name)
    with strategy.scope():
        if model_name == "sparse":
            model = kind.sparse_model("float64")
            x, y = sparse_data(96, "float64")
        else:
            model = kind.dense_model("float64")
            x, y = dense_data(96, "float64")
        steps = 1 if strategy_name == "none" else 3
        if "nested" in options:
            lso = kind.keras.mixed_precision.LossScaleOptimizer
            optimizer = lso(accumulate(kind.optimizer("Adam", 0.05), steps))
        else:
            optimizer = accumulate(kind.optimizer("Adam", 0.05), steps)
        model.compile(optimizer, "mse", jit_compile=False)
    # Global batches of 8 and windows of 3: four updates by 24, and a partial one is left
    # of 96 - 8 examples; one replica takes the same windows as batches.
    examples = 72 if "whole" in options else 88
    x, y = x[:examples], y[:examples]
    if strategy_name == "none":
        for start in range(0, examples, 24):
            model.train_on_batch(x[start : start + 24], y[start : start + 24])
    else:
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
        distributed = tf.data.Options()
        distributed.experimental_distribute.auto_shard_policy = (
            tf.data.experimental.AutoShardPolicy.DATA
        )
        callbacks = [] if "nested" in options else [AccumulationCallback("apply")]
        model.fit(
            data.with_options(distributed),
            epochs=1,
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
        )
    np.savez(output, *model.get_weights())
    report = {"updates": int(model.optimizer.iterations.numpy())}
    if strategy_name != "none":
        report["reductions"] = rows
    print(json.dumps(report))


def _record_reductions() -> list[list]:
    """Returns the list that reductions over replicas are noted in while tracing.

    A row has the replica, the innermost graphs' names and the number of tensors.
    """
    rows = []
    context = tf.distribute.ReplicaContext
    all_reduce = context.all_reduce

    def noting(self, reduce_op, value, *args, **kwargs):
        graph, names = tf.compat.v1.get_default_graph(), []
        while graph is not None:
            names.append(getattr(graph, "name", ""))
            graph = getattr(graph, "outer_graph", None)
        replica = self.replica_id_in_sync_group
        replica = -1 if isinstance(replica, tf.Tensor) else int(replica)
        rows.append([replica, names, len(tf.nest.flatten(value))])
        return all_reduce(self, reduce_op, value, *args, **kwargs)

    context.all_reduce = noting
    return rows


if __name__ == "__main__":
    main()
