"""Trains one Keras model in `fit` under a strategy; run by test_keras_strategies.py.

usage: keras_strategy_program.py ROOT KIND STRATEGY OUTPUT [nested]

STRATEGY is "mirrored" (two logical CPUs) or "workers" (one task of TF_CONFIG); "nested"
puts the optimizer into a LossScaleOptimizer. Eleven batches of 8 are three windows of 3
and a partial one, which is applied. OUTPUT.npz takes the weights; the updates and the
reductions that were traced are printed as one JSON line.
"""

import json
import sys

import numpy as np
import tensorflow as tf


def main() -> None:
    root, kind_name, strategy_name, output, *options = sys.argv[1:]
    cpus = tf.config.list_physical_devices("CPU")
    if strategy_name == "mirrored":
        tf.config.set_logical_device_configuration(
            cpus[0], [tf.config.LogicalDeviceConfiguration()] * 2
        )
        strategy = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    else:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    from keras_kinds import Kind, sparse_data

    from estimator_accum.keras import AccumulationCallback, accumulate

    rows = _record_reductions()
    kind = Kind(root, kind_name)
    with strategy.scope():
        model = kind.sparse_model("float64")
        optimizer = kind.optimizer("Adam", 0.05)
        if "nested" in options:
            loss_scaling = kind.keras.mixed_precision.LossScaleOptimizer
            optimizer = loss_scaling(accumulate(optimizer, 3))
        else:
            optimizer = accumulate(optimizer, 3)
        model.compile(optimizer, "mse", jit_compile=False)
    x, y = sparse_data(88, "float64")
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    distributed = tf.data.Options()
    distributed.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.DATA
    )
    callback = AccumulationCallback("apply")
    data = data.with_options(distributed)
    model.fit(data, shuffle=False, verbose=0, callbacks=[callback])
    np.savez(output, *model.get_weights())
    report = {
        "updates": int(model.optimizer.iterations.numpy()),
        "reductions": rows,
    }
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
