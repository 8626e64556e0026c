"""Keras: settings that would be ignored or fail later raise an error."""

from unittest import mock

import pytest
import tensorflow as tf

from estimator_accum import make_accumulating_train_op
from estimator_accum.keras import _accumulate, accumulate
from tests.helpers.models.keras_kinds import apply_each, dense_data, fit
from tests.helpers.processes import running

_IN_A_GRAPH = """
import numpy as np, tensorflow as tf
from estimator_accum.keras import AccumulationCallback, accumulate
tf.compat.v1.disable_eager_execution()
keras = tf.keras if tf.__version__.startswith("2.15") else __import__("tf_keras")
model = keras.Sequential([keras.layers.Dense(1)])
model.compile(accumulate(keras.optimizers.legacy.SGD(), 2), "mse")
model.fit(np.ones([4, 1]), np.ones([4, 1]), callbacks=[AccumulationCallback()])
"""


def test_a_keras_before_2_15_is_refused(kind, monkeypatch):
    monkeypatch.setattr(_accumulate, "is_supported", lambda keras: False)
    with pytest.raises(
        TypeError, match="must be of Keras 2.15 or later. Received: one"
    ):
        accumulate(kind.optimizer("SGD", 0.1), 2)


@pytest.mark.parametrize("steps", [1, 2])
def test_steps_that_a_traced_function_would_ignore_are_refused(kind, steps):
    model = kind.dense_model()
    optimizer = accumulate(kind.optimizer("SGD", 0.1), steps)
    optimizer.gradient_accumulation_steps = steps  # nothing is traced yet
    fit(model, optimizer, dense_data(8), 4)
    sentence = f"would continue with {steps}. Received: 4. Pass"
    with pytest.raises(ValueError, match=sentence):
        optimizer.gradient_accumulation_steps = 4


def test_steps_that_a_built_optimizer_has_no_window_for_are_refused(kind):
    optimizer = accumulate(kind.optimizer("SGD", 0.1), 1)
    optimizer.build([tf.Variable(1.0)])
    with pytest.raises(ValueError, match="without a window. Received: 4. Pass it to"):
        optimizer.gradient_accumulation_steps = 4


def test_steps_that_are_set_to_one_close_the_open_window(kind):
    variable, optimizer = tf.Variable(0.0), accumulate(kind.optimizer("SGD", 1.0), 4)
    assert apply_each(optimizer, variable, [1.0, 2.0]) == [0.0, 0.0]
    optimizer.gradient_accumulation_steps = 1
    assert apply_each(optimizer, variable, [6.0, 5.0]) == [-3.0, -8.0]


def test_callback_in_a_graph_is_refused():
    done = running.run("-c", _IN_A_GRAPH)
    assert done.returncode == 1
    assert "Received: fit() in a graph. Leave the callback out" in done.stderr


def test_train_op_inside_a_function_is_refused():
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(1.0)

    @tf.function
    def step():
        return make_accumulating_train_op(tf.constant(1.0), optimizer, 2)

    sentence = r"Received: a tf\.function\. Call it in a mod"
    with pytest.raises(RuntimeError, match=sentence):
        step()


def test_train_op_in_eager_execution_is_refused():
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(1.0)
    with pytest.raises(RuntimeError, match=r"Received: eager execution\. Call it in a"):
        make_accumulating_train_op(tf.constant(1.0), optimizer, 2)


def test_gradients_outside_of_a_replica_are_refused(kind):
    with tf.distribute.MirroredStrategy(["/cpu:0"]).scope():
        variable = tf.Variable(0.0)
        optimizer = accumulate(kind.optimizer("SGD", 1.0), 2)
        with pytest.raises(RuntimeError, match="Call it inside strategy.run"):
            optimizer.apply_gradients([(tf.constant(1.0), variable)])


def test_parameter_servers_are_refused(kind, monkeypatch):
    servers = mock.MagicMock(tf.distribute.ParameterServerStrategy)
    variable, optimizer = tf.Variable(0.0), accumulate(kind.optimizer("SGD", 1.0), 2)
    monkeypatch.setattr(tf.distribute, "get_strategy", lambda: servers)
    with pytest.raises(ValueError, match="Received: a ParameterServerStrategy. Use Mu"):
        optimizer.build([variable])


def test_a_variable_that_stands_twice_in_the_pairs_is_refused(kind):
    """Such as an embedding that is listed with the encoder and with the decoder."""
    tied, other = (tf.Variable(1.0, name=name) for name in ("tied", "other"))
    optimizer = accumulate(kind.optimizer("SGD", 1.0), 2)
    pairs = [(tf.constant(1.0), v) for v in (tied, other, tied)]
    with pytest.raises(ValueError, match="Received: tied twice. Leave the second"):
        optimizer.apply_gradients(pairs)


def test_an_optimizer_with_a_minimize_of_its_own_is_refused(kind):
    class Minimizing(type(kind.optimizer("SGD"))):
        def minimize(self, loss, *args, **kwargs):
            return super().minimize(2 * loss, *args, **kwargs)

    scaled = kind.keras.mixed_precision.LossScaleOptimizer
    for optimizer in (Minimizing(1.0), scaled(Minimizing(1.0))):
        with pytest.raises(TypeError, match=r"Received: Minimizing\. Override apply"):
            accumulate(optimizer, 2)


def test_a_hyperparameter_that_is_set_reaches_the_wrapped_optimizer(kind):
    variable = tf.Variable(0.0)
    optimizer = accumulate(kind.optimizer("SGD", 1.0), 1)
    optimizer.clipnorm = 0.5
    optimizer.apply_gradients([(tf.constant(4.0), variable)])
    assert variable.numpy() == -0.5


def test_partial_windows_are_applied_by_one_trace(kind):
    traces = []

    class Schedule(kind.keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            traces.append(step)
            return tf.constant(1.0)

    variable = tf.Variable(0.0)
    optimizer = accumulate(kind.optimizer("SGD", Schedule()), 3)
    called = []
    for _ in range(3):
        optimizer.apply_gradients([(tf.constant(1.0), variable)])
        assert optimizer.apply_partial_window()
        called.append(len(traces))
    assert variable.numpy() == -3.0
    assert called[0] == called[-1] > 0
    assert int(optimizer.micro_steps.numpy()) == 0
