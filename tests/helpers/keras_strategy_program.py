"""Trains one Keras model in `fit` under a strategy; run by test_keras_strategies.py.

usage: keras_strategy_program.py ROOT KIND STRATEGY OUTPUT [OPTION]

STRATEGY is "mirrored" (two logical CPUs) or "workers" (one task of TF_CONFIG). OPTION
"nested" puts the optimizer into a LossScaleOptimizer, "multi" trains by a
MultiOptimizer, "loop" without `fit`, "plain" without accumulation, and "resume" some
batches with one replica. Eleven batches of 8 are three windows of 3 and a partial one,
which is applied. The weights are written to OUTPUT.npz; the number of updates, the
traced reductions and the last window's loss are printed as one JSON line.
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

    reductions = _record_reductions()
    kind = Kind(root, kind_name)
    with strategy.scope():
        model = kind.sparse_model("float64")
        optimizer = kind.optimizer("Adam", 0.05)
        if "nested" in options:
            loss_scaling = kind.keras.mixed_precision.LossScaleOptimizer
            optimizer = loss_scaling(accumulate(optimizer, 3))
        elif "multi" in options:
            optimizers = kind.keras.optimizers
            optimizer = optimizers.MultiOptimizer(optimizers.OptimizerMap(optimizer))
            optimizer = accumulate(optimizer, 3)
        elif "plain" not in options:
            optimizer = accumulate(optimizer, 3)
        model.compile(optimizer, "mse", jit_compile=False)
    x, y = sparse_data(88, "float64")
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    distributed = tf.data.Options()
    distributed.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.DATA
    )
    data = data.with_options(distributed)
    if "loop" in options:
        _train(model, strategy, data)
    else:
        if "resume" in options:
            for batches, others in (4, tf.distribute.get_strategy()), (3, strategy):
                model.fit(data.take(batches), shuffle=False, verbose=0)
                data = data.skip(batches)
                model = _loaded(kind, model, output, others.scope())
        callbacks = [] if "plain" in options else [AccumulationCallback("apply")]
        model.fit(data, shuffle=False, verbose=0, callbacks=callbacks)
    np.savez(output, *model.get_weights())
    report = {
        "updates": int(model.optimizer.iterations.numpy()),
        "reductions": reductions,
    }
    if not options:
        report["window_loss"] = float(optimizer.window_loss.numpy())
    print(json.dumps(report))


def _loaded(kind, model, path, scope):
    """Saves the model in mid-window, and loads it for other replicas."""
    path += ".h5" if kind.is_legacy else ".keras"
    model.save(path)
    with scope:
        custom = {"Summing": type(model)}
        return kind.keras.models.load_model(path, custom_objects=custom)


def _train(model, strategy, data) -> None:
    """Trains like `fit`, in a custom loop."""
    step = tf.function(lambda batch: strategy.run(model.train_step, args=(batch,)))
    for batch in strategy.experimental_distribute_dataset(data):
        step(batch)
    model.optimizer.apply_partial_window()


def _record_reductions() -> list[str]:
    """Returns a list to which each reduction over replicas adds its graph's name.

    Every replica reduces by its own `all_reduce`; if all replicas are CPUs of one
    process, the library sums on one device, once for all of them.
    """
    names = []

    def noting(function):
        def run(*args, **kwargs):
            names.append(tf.compat.v1.get_default_graph().name)
            return function(*args, **kwargs)

        return run

    for owner, name in (
        (tf.distribute.ReplicaContext, "all_reduce"),
        (tf.distribute.ReductionToOneDevice, "batch_reduce"),
    ):
        setattr(owner, name, noting(getattr(owner, name)))
    return names


if __name__ == "__main__":
    main()
