"""Other modes have no accumulators: graphs, exports, warm starts."""

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import AccumulatingOptimizer, make_accumulation_hooks

v1 = tf.compat.v1


def _input_fn():
    x = np.arange(24, dtype=np.float32).reshape(8, 3) / 24
    return tf.data.Dataset.from_tensor_slices(({"x": x}, x[:, :1])).batch(2)


def _model_fn(features, labels, mode, params):
    # Created in every mode, as legacy code does.
    sgd = v1.train.GradientDescentOptimizer(0.1)
    optimizer = AccumulatingOptimizer(sgd, params["steps"], 1.0)
    weights = v1.get_variable("weights", [3, 1], initializer=v1.ones_initializer())
    spec = tf.estimator.RegressionHead().create_estimator_spec(
        features,
        mode,
        tf.matmul(features["x"], weights),
        labels,
        trainable_variables=[weights],
        train_op_fn=lambda loss: optimizer.minimize(
            loss, v1.train.get_or_create_global_step()
        ),
    )
    if mode == tf.estimator.ModeKeys.TRAIN and params["init"]:
        v1.train.init_from_checkpoint(params["init"], {"/": "/"})
    return spec


def _estimator(folder, steps=3, **options):
    params = {"steps": steps, "init": options.pop("init", None)}
    return tf.estimator.Estimator(_model_fn, str(folder), params=params, **options)


def _train_one(folder, **options):
    """Trains for one micro-step."""
    estimator = _estimator(folder, **options)
    estimator.train(_input_fn, hooks=make_accumulation_hooks(), steps=1)
    return estimator


class _Names(v1.train.SessionRunHook):
    """Records the names of the graph's operations."""

    def begin(self):
        self.found = {op.name for op in v1.get_default_graph().get_operations()}

    def of_accumulation(self):
        return {name for name in self.found if "accumul" in name}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    estimator = _estimator(tmp_path_factory.mktemp("trained"))
    names = _Names()
    estimator.train(_input_fn, hooks=[names, *make_accumulation_hooks()], steps=4)
    assert "weights/accumulator" in names.of_accumulation()  # the control
    return estimator


def test_evaluation_and_prediction_graphs_contain_no_accumulator(trained):
    evaluating, predicting = _Names(), _Names()
    trained.evaluate(_input_fn, hooks=[evaluating])
    list(trained.predict(_input_fn, hooks=[predicting]))
    assert not evaluating.of_accumulation()
    assert not predicting.of_accumulation()


def test_an_export_contains_no_accumulator(trained, tmp_path):
    def receiver():
        features = {"x": v1.placeholder(tf.float32, [None, 3])}
        return tf.estimator.export.ServingInputReceiver(features, features)

    path = trained.export_saved_model(str(tmp_path / "export"), receiver).decode()
    names = [name for name, _ in tf.train.list_variables(f"{path}/variables/variables")]
    assert names == ["global_step", "weights"]


@pytest.mark.parametrize("patterns", [[], [[".*"]]])
def test_warm_starts_leave_the_window_empty(patterns, trained, tmp_path):
    """A list of patterns means global variables, and so includes the accumulators."""
    settings = tf.estimator.WarmStartSettings(trained.model_dir, *patterns)
    warm = _train_one(tmp_path / "warm", warm_start_from=settings)
    assert warm.get_variable_value("accumulation/micro_steps") == 1
    assert warm.get_variable_value("update_step") == 0
    np.testing.assert_array_equal(
        warm.get_variable_value("weights"), trained.get_variable_value("weights")
    )


def _save_plain(folder) -> np.ndarray:
    """Saves a checkpoint without accumulators; returns its weights."""
    weights = np.full([3, 1], 0.25, np.float32)
    with tf.Graph().as_default(), v1.Session() as session:
        v1.get_variable("weights", initializer=weights)
        v1.train.get_or_create_global_step()
        session.run(v1.global_variables_initializer())
        v1.train.Saver().save(session, str(folder / "model.ckpt"))
    return weights


def test_a_list_of_patterns_without_accumulators_takes_any_checkpoint(tmp_path):
    plain = tmp_path / "plain"
    weights = _save_plain(plain)
    patterns = ["^(?!.*(accumul|update_step)).*"]
    settings = tf.estimator.WarmStartSettings(str(plain), patterns)
    warm = _train_one(tmp_path / "warm", warm_start_from=settings)
    np.testing.assert_array_equal(warm.get_variable_value("weights"), weights)


def test_init_from_checkpoint_of_all_variables_ignores_accumulators(trained, tmp_path):
    """From a checkpoint with them and from one without."""
    plain = tmp_path / "plain"
    weights = _save_plain(plain)
    for source, expected in (
        (str(plain), weights),
        (trained.model_dir, trained.get_variable_value("weights")),
    ):
        estimator = _train_one(tmp_path / f"from_{len(source)}", init=source)
        np.testing.assert_array_equal(estimator.get_variable_value("weights"), expected)
        assert estimator.get_variable_value("accumulation/micro_steps") == 1
