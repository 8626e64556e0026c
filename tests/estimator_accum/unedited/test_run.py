"""`estimator-accum run`: scripts as they are, with their batches cut."""

import functools
import json
import logging
import re

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import AccumulatingOptimizer
from estimator_accum.graph import internals
from estimator_accum.unedited import run as command
from estimator_accum.unedited import session_loops
from estimator_accum.unedited.estimators import cut_batches
from estimator_accum.unedited.own_loops import OwnLoops
from tests.helpers.models.interfaces import sgd
from tests.helpers.models.microbatch_runs import (
    INPUT,
    make_model_fn,
    plain,
    save_step,
    train,
    variables_of,
    word_columns,
    words_input_fn,
)
from tests.helpers.models.toy_models import relative_difference
from tests.helpers.processes import legacy_runs, running

v1 = tf.compat.v1

_SCRIPT = """
import sys
import neighbor
import numpy as np
import tensorflow as tf
assert __name__ == "__main__" and neighbor.__file__.startswith(sys.path[0])
def model_fn(features, labels, mode):
    w = tf.compat.v1.get_variable("w", initializer=0.0)
    loss = tf.reduce_mean(tf.square(w - features))
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.5)
    train_op = optimizer.minimize(loss, tf.compat.v1.train.get_global_step())
    shape = tf.compat.v1.Print(tf.shape(features), [tf.shape(features)], "cut")
    with tf.control_dependencies([shape]):
        loss = tf.identity(loss)
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)
def input_fn():
    return tf.data.Dataset.range(8).map(lambda x: tf.cast(x, tf.float32)).batch(4)
estimator = tf.estimator.Estimator(model_fn, "model")
estimator.train(input_fn)
print("w", estimator.get_variable_value("w"), sys.argv[1:])
if "--fail" in sys.argv:
    raise KeyError("the script's own")
sys.exit(7)
"""


_OF_TWO_WORKERS = """
import json
import os
import tensorflow as tf
tf.compat.v1.disable_eager_execution()
first = 8 * json.loads(os.environ["TF_CONFIG"])["task"]["index"]
def model_fn(features, labels, mode):
    w = tf.compat.v1.get_variable("w", initializer=0.0)
    loss = tf.reduce_mean(tf.square(w - features))
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.5)
    train_op = optimizer.minimize(loss, tf.compat.v1.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)
def input_fn():
    data = tf.data.Dataset.range(first, first + 8)
    return data.map(lambda x: tf.cast(x, tf.float32)).batch(4)
strategy = tf.distribute.MultiWorkerMirroredStrategy()
config = tf.estimator.RunConfig(
    "model",
    train_distribute=strategy,
    save_checkpoints_steps=1000,
    experimental_max_worker_delay_secs=0,
)
estimator = tf.estimator.Estimator(model_fn, config=config)
train_spec = tf.estimator.TrainSpec(input_fn, max_steps=2)
tf.estimator.train_and_evaluate(estimator, train_spec, tf.estimator.EvalSpec(input_fn))
if first == 0:
    print("w", estimator.get_variable_value("w"))
"""


# TensorFlow rewrites no graph to bfloat16 on a GPU.
_ON_GPU = """
import tensorflow as tf
tf.config.list_physical_devices = lambda kind=None: ["GPU:0"]
tf.compat.v1.Session(graph=tf.Graph())
"""


def _run(*arguments, cwd, **variables) -> legacy_runs.running.Done:
    command = ["-m", "estimator_accum", "run", *arguments]
    return legacy_runs.run_python(None, *command, cwd=cwd, **variables)


@pytest.fixture
def script(tmp_path):
    (tmp_path / "script.py").write_text(_SCRIPT)
    (tmp_path / "neighbor.py").write_text("")
    return tmp_path / "script.py"


def test_a_script_runs_as_it_is_and_its_batches_are_cut(script):
    flags = ["--its=flag", "--micro_batches=9"]
    done = _run("--micro_batches=2", script, *flags, cwd=script.parent)
    assert done.returncode == 7, done.output
    assert done.stdout.endswith(f"w 5.5 {flags}\n")  # the mean of 4 to 7
    said = "micro-batches: __main__.model_fn trains each batch in 2 micro-batches"
    assert f"{said}, then updates once" in done.stderr
    assert not (script.parent / "model" / "micro_batches.json").exists()


def test_a_scripts_error_is_shown_as_under_python(script):
    done = _run(script, "--fail", cwd=script.parent)
    assert done.returncode == 1
    trace = done.stderr[done.stderr.rindex("Traceback") :].splitlines()
    assert re.match(r'  File ".*script\.py", line \d+, in <module>', trace[1])
    assert trace[-1] == 'KeyError: "the script\'s own"'
    assert "in 1, 2, 4, ... micro-batches, the first number that fits" in done.stderr
    module = _run("-m", "script", "--its=flag", cwd=script.parent)
    assert module.returncode == 7
    assert module.stdout.endswith("['--its=flag']\n")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("", r"A Python script must be given\. Received: none\."),
        ("no_such.py", r"A Python script must be given\. Received: no_such\.py\."),
        ("--micro_batches=0 x", r"must be an integer >= 1\. Received: 0\. Or use auto"),
        ("--gradient_accumulation_steps=x y", r"an integer >= 1\. Received: x\."),
        (
            f"--micro_batches=2 --gradient_accumulation_steps=2 {__file__}",
            r"for scripts without an Estimator, .* Received: both\. Leave one out\.",
        ),
    ],
)
def test_flags_that_do_not_fit_are_one_sentence(line, sentence, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(line.split())
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("estimator-accum run: ") and said.count("\n") == 1
    assert re.search(rf"{sentence}.*See --help\.\n$", said)


@pytest.fixture
def _cut(monkeypatch, own_sessions):
    """Cuts the batches of all Estimators during the test."""
    for place in (internals.call_of_model_fn(), internals.call_of_train()):
        monkeypatch.setattr(*place, getattr(*place))
    return cut_batches(3)


def _config(folder) -> tf.estimator.RunConfig:
    return tf.estimator.RunConfig(
        str(folder), tf_random_seed=7, log_step_count_steps=None, save_summary_steps=1
    )


def _train_canned(folder) -> dict[str, np.ndarray]:
    estimator = v1.estimator.DNNClassifier(
        [4], [word_columns()[0]], optimizer="Adagrad", config=_config(folder)
    )
    estimator.train(words_input_fn)
    assert estimator.evaluate(words_input_fn)["global_step"] == 3
    return variables_of(estimator)


def _train_by_spec(folder) -> dict[str, np.ndarray]:
    class Mine(tf.estimator.Estimator):
        """A subclass, whose model_fn has parameters, in train_and_evaluate."""

        def __init__(self):
            def model_fn(features, labels, mode, params):
                model_fn = make_model_fn(plain(params["optimizer"]))
                return model_fn(features, labels, mode)

            params = {"optimizer": "momentum"}
            super().__init__(model_fn, config=_config(folder), params=params)

    estimator = Mine()
    tf.estimator.train_and_evaluate(
        estimator,
        tf.estimator.TrainSpec(INPUT, max_steps=4),
        tf.estimator.EvalSpec(INPUT, steps=1),
    )
    return variables_of(estimator)


def _train_added_metrics(folder) -> dict[str, np.ndarray]:
    """Estimators made of another one, with a metric of theirs."""

    def metrics(labels):
        return {"square": v1.metrics.mean(tf.square(labels))}

    estimator = tf.estimator.Estimator(
        make_model_fn(plain("sgd")), config=_config(folder)
    )
    estimator = tf.estimator.Estimator(estimator.model_fn, config=_config(folder))
    estimator = tf.estimator.add_metrics(estimator, metrics)
    estimator.train(INPUT, max_steps=2)
    return {"square": estimator.evaluate(INPUT)["square"], **variables_of(estimator)}


def _train_tpu_estimator(folder) -> dict[str, np.ndarray]:
    tpu = v1.estimator.tpu

    def model_fn(params, features, labels, mode):
        model_fn = make_model_fn(plain(params["optimizer"]))
        spec = model_fn(features, labels, mode)
        return tpu.TPUEstimatorSpec(mode, loss=spec.loss, train_op=spec.train_op)

    estimator = tpu.TPUEstimator(
        functools.partial(model_fn),
        config=tpu.RunConfig(model_dir=str(folder), tf_random_seed=7),
        params={"optimizer": "adagrad"},
        use_tpu=False,
        train_batch_size=16,
    )
    estimator.train(lambda params: INPUT(), max_steps=2)
    return variables_of(estimator)


def _train_own(folder) -> dict[str, np.ndarray]:
    return train(make_model_fn(plain("adam")), folder, INPUT)


_HELPERS = "tests.helpers.models.microbatch_runs.make_model_fn.model_fn"
_ESTIMATORS = [  # with the name of the model_fn
    (_train_own, _HELPERS),
    (_train_canned, "tensorflow_estimator.python.estimator.canned.dnn."),
    (_train_by_spec, f"{__name__}._train_by_spec.Mine.__init__.model_fn"),
    (_train_added_metrics, "tensorflow_estimator.python.estimator.extenders."),
    (_train_tpu_estimator, "tensorflow_estimator.python.estimator.tpu."),
]


@pytest.mark.parametrize(("trained", "name"), _ESTIMATORS)
def test_every_kind_of_estimator_is_cut_once_and_trains_as_before(
    trained, name, tmp_path, request, caplog
):
    theirs = trained(tmp_path / "whole")
    request.getfixturevalue("_cut")
    with caplog.at_level(logging.INFO):
        ours = trained(tmp_path / "cut")
    assert ours.keys() == theirs.keys()
    assert 0 < relative_difference(ours, theirs) <= 5e-6
    said = [message for message in caplog.messages if "trains each batch" in message]
    assert len(said) == 1
    assert re.match(
        rf"micro-batches: {re.escape(name)}\S* trains each batch in 3 micro-batches, "
        "then updates once$",
        said[0],
    )


_WINDOW_BY_HAND = """
import tensorflow as tf
def model_fn(features, labels, mode, params, config):
    w = tf.get_variable("w", initializer=0.5)
    head = tf.contrib.estimator.regression_head(name="price")
    def train_op_fn(loss):
        step = tf.train.get_global_step()
        sums = [tf.Variable(tf.zeros_like(w.initialized_value()), trainable=False)]
        adds = [s.assign_add(g) for s, g in zip(sums, tf.gradients(loss, [w]))]
        def apply():
            optimizer = tf.train.GradientDescentOptimizer(0.1)
            update = optimizer.apply_gradients([(sums[0] / params["steps"], w)])
            with tf.control_dependencies([update]):
                return tf.group(sums[0].assign(0.0))
        with tf.control_dependencies(adds):
            is_last = tf.equal(step % params["steps"], params["steps"] - 1)
            window = tf.cond(is_last, apply, tf.no_op)
        with tf.control_dependencies([window]):
            return tf.assign_add(step, 1)
    logits = w * features["x"]
    return head.create_estimator_spec(
        features, mode, logits, labels=labels, train_op_fn=train_op_fn)
def metrics(labels, predictions):
    return {"mae": tf.metrics.mean_absolute_error(labels, predictions["predictions"])}
def input_fn():
    x = tf.reshape(tf.range(24, dtype=tf.float32) / 10, [24, 1])
    data = tf.data.Dataset.from_tensor_slices(({"x": x}, tf.square(x)))
    return data.batch(4).make_one_shot_iterator().get_next()
estimator = tf.estimator.Estimator(model_fn, "model", params={"steps": 3})
estimator = tf.contrib.estimator.add_metrics(estimator, metrics)
estimator.train(input_fn)
found = estimator.evaluate(input_fn)
print(estimator.get_variable_value("w"), found["loss"], found["average_loss/price"],
      found["mae"], found["global_step"])
"""


def test_a_script_of_tensorflow_1_keeps_the_window_that_it_makes_by_hand(tmp_path):
    (tmp_path / "script.py").write_text(_WINDOW_BY_HAND)
    done = _run("--v1", "--micro_batches=2", "script.py", cwd=tmp_path)
    assert done.returncode == 0, done.output
    x = np.arange(24.0) / 10
    w = 0.5
    for examples in np.split(x, 2):  # a window of three batches of 4
        w -= 0.1 * np.mean(2 * (w * examples - examples**2) * examples)
    errors = w * x - x**2
    squared = np.mean(errors**2)
    values = [float(word) for word in done.stdout.split()]
    expected = [w, squared, squared, np.mean(np.abs(errors)), 6]
    np.testing.assert_allclose(values, expected, rtol=1e-5)
    assert "trains each batch in 2 micro-batches, then updates once" in done.stderr


_LOOP = """
import sys
import tensorflow as tf
tf = tf.compat.v1
tf.disable_v2_behavior()
tf.enable_resource_variables()
class Plain(tf.train.Optimizer):
    def __init__(self, rate):
        super().__init__(False, "Plain")
        self.rate = rate
    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        updates = [v.assign_sub(self.rate * g) for g, v in grads_and_vars]
        return tf.group(*updates, global_step.assign_add(1), name=name)
x = tf.placeholder(tf.float32, [None])
w = tf.get_variable("w", initializer=0.0, use_resource=True)
loss = tf.reduce_mean(tf.square(w - x))
step = tf.train.get_or_create_global_step()
rate = tf.train.piecewise_constant(step, [0], [0.5, 0.25])
kinds = {"own": Plain, "tensorflow": tf.train.GradientDescentOptimizer}
train_op = kinds[sys.argv[1]](rate).minimize(loss, step)
hooks = [tf.train.StopAtStepHook(last_step=2)]
with tf.train.MonitoredTrainingSession(hooks=hooks) as session:
    fed, seen = 0, []
    while not session.should_stop():
        session.run(train_op, {x: [fed]})
        fed += 1
        if not session.should_stop():
            seen.append(session.run([step, w]))
print(fed, [(int(s), float(v)) for s, v in seen])
"""


@pytest.mark.parametrize("kind", ["own", "tensorflow"])
def test_a_loop_of_session_runs_accumulates_and_counts_updates(kind, tmp_path):
    (tmp_path / "loop.py").write_text(_LOOP)
    flags = ["--gradient_accumulation_steps=2", "loop.py", kind]
    done = _run(*flags, cwd=tmp_path)
    assert done.returncode == 0, done.output
    # The first update is towards 0.5 by the first rate; the second ends the loop.
    last = done.stdout.splitlines()[-1]
    assert last == "4 [(0, 0.0), (1, 0.5), (1, 0.5)]"
    assert "2 calls of session.run make one update" in done.stderr
    assert "reads global_step" not in done.stderr
    assert "make_accumulation_hooks" not in done.stderr


# Trainings of w, and what is printed: the value after two calls with 0 and 1, or more.
_WAYS = """
import sys
import tensorflow as tf
keras = tf.keras.optimizers
tf = tf.compat.v1
tf.disable_eager_execution()
x = tf.placeholder(tf.float32, [None])
w = tf.get_variable("w", initializer=0.0)
loss = tf.reduce_mean(tf.square(w - x))
step = tf.train.get_or_create_global_step()
def clipped(pairs):
    gradients, variables = zip(*pairs)
    return zip(tf.clip_by_global_norm(gradients, 0.5)[0], variables)
def by_tf_gradients():
    optimizer = tf.train.GradientDescentOptimizer(0.5)
    pairs = clipped(zip(tf.gradients(loss, [w]), [w]))
    return optimizer.apply_gradients(pairs, step)
def by_loss_scaling():
    optimizer = tf.train.GradientDescentOptimizer(0.5)
    optimizer = tf.mixed_precision.MixedPrecisionLossScaleOptimizer(optimizer, "dynamic")
    return optimizer.apply_gradients(clipped(optimizer.compute_gradients(loss)), step)
def by_keras():
    return keras.legacy.SGD(0.5).get_updates(loss, [w])
def by_hand():
    return w.assign_sub(0.5 * tf.gradients(loss, [w])[0])
train_op = globals()[sys.argv[1]]()
with tf.train.MonitoredTrainingSession() as session:
    for value in (0.0, 1.0):
        session.run(train_op, {x: [value]})
    print("w", session.run(w))
"""


@pytest.mark.parametrize(
    ("way", "code", "said"),
    [
        # The mean -1 of the gradients 0 and -2 is clipped; of the clipped it is -0.25.
        ("by_tf_gradients", 0, r"\nw 0\.25\n"),
        ("by_loss_scaling", 0, r"\nw 0\.25\n"),
        (
            "by_keras",
            2,
            r"must train by optimizers of tf\..*Received: SGD of Keras",
        ),
        ("by_hand", 1, r"\nw 1\.0\n(.*\n)*.*so nothing was accumulated"),
    ],
)
def test_a_loop_is_accumulated_as_a_whole_or_it_is_said(way, code, said, tmp_path):
    (tmp_path / "loop.py").write_text(_WAYS)
    flags = ["--gradient_accumulation_steps=2", "loop.py", way]
    done = _run(*flags, cwd=tmp_path)
    assert done.returncode == code, done.output
    assert re.search(said, f"\n{done.output}")
    assert "Traceback" not in done.output


@pytest.mark.once
@pytest.mark.parametrize("name", ["run", "check"])
def test_a_loop_without_an_estimator_ends_where_it_would_train(name, tmp_path):
    (tmp_path / "loop.py").write_text(_WAYS)
    line = ["-m", "estimator_accum", name, "loop.py", "by_tf_gradients"]
    done = legacy_runs.run_python(None, *line, cwd=tmp_path)
    assert done.returncode == 1
    assert "the script trained no Estimator" in done.output
    assert "Traceback" not in done.output and not re.search(
        "^w ", done.stdout, re.MULTILINE
    )


@pytest.mark.once
def test_the_batches_of_two_workers_are_cut(tmp_path):
    (tmp_path / "script.py").write_text(_OF_TWO_WORKERS)
    command = ("-m", "estimator_accum", "run", "--micro_batches=2", "script.py")
    with running.cluster(command, jobs=("worker", "worker"), cwd=tmp_path) as tasks:
        first, second = (task.wait() for task in tasks)
    assert first.returncode == second.returncode == 0
    assert first.stdout.endswith("w 9.5\n")  # the mean of 4 to 7 and of 12 to 15
    assert "batch of this task 4 = 2 examples x 2 micro-batches" in first.stderr


def test_workers_that_share_weights_on_servers_are_refused(_cut, monkeypatch, capsys):
    """An optimizer of one's own reads the servers with every micro-batch."""
    config = running.tf_configs("chief", "worker", "ps")[0]
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    estimator = tf.estimator.Estimator(make_model_fn(plain("sgd")))
    with pytest.raises(SystemExit) as ended:
        estimator.train(INPUT, steps=1)
    assert ended.value.code == 2
    assert "must train by this library" in capsys.readouterr().err


def test_a_script_that_trains_nothing_is_told_at_its_end(_cut, capsys):
    assert _cut() == 1
    assert "trained no Estimator, so no batch was split" in capsys.readouterr().err


def test_a_finished_training_is_no_error(_cut, tmp_path, capsys):
    model_fn = make_model_fn(plain("sgd"))
    save_step(tmp_path)
    tf.estimator.Estimator(model_fn, str(tmp_path)).train(INPUT, max_steps=1)
    assert _cut() == 0
    assert "trained no Estimator" not in capsys.readouterr().err


def test_a_training_that_fails_is_not_finished(_cut, tmp_path, capsys):
    def fail():
        raise ValueError("no data")

    with pytest.raises(ValueError, match="no data"):
        tf.estimator.Estimator(make_model_fn(plain("sgd")), str(tmp_path)).train(fail)
    assert _cut() == 1
    assert "trained no Estimator" in capsys.readouterr().err


@pytest.mark.usefixtures("own_sessions", "fresh_graph")
def test_only_calls_that_write_from_gradients_train():
    seen = []
    loops = OwnLoops(lambda: seen.append(1))
    weight = v1.get_variable("w", initializer=1.0)
    (gradient,) = tf.gradients(weight**2, [weight])
    _, norm = v1.metrics.mean(gradient)
    with v1.Session() as session:
        session.run(
            [v1.global_variables_initializer(), v1.local_variables_initializer()]
        )
        session.run([gradient, norm, weight.assign(2.0)])
        assert not seen
        session.run(weight.assign_sub(gradient))
        session.run(weight.assign_sub(gradient))
        assert seen == [1]
    with tf.Graph().as_default() as graph, v1.Session() as session:
        loops.ignore(graph)
        weight = v1.get_variable("w", initializer=1.0)
        session.run(weight.initializer)
        session.run(sgd().minimize(weight**2))
    assert seen == [1]


def test_a_precision_that_the_device_lacks_is_refused_in_a_sentence(tmp_path):
    (tmp_path / "script.py").write_text(_ON_GPU)
    done = _run("--precision=bfloat16", "script.py", cwd=tmp_path)
    assert done.returncode == 2, done.output
    said = "estimator-accum run: `precision` must be one that TensorFlow can rewrite"
    assert done.stderr.splitlines()[-1].startswith(said)
    assert "Received: 'bfloat16', with a GPU. Use 'float16'." in done.stderr
    assert "Traceback" not in done.output


@pytest.mark.usefixtures("fresh_graph")
class TestWritesBesideTheUpdate:
    """Writes in the call of session.run that trains: K per update, if allowed."""

    @pytest.fixture(autouse=True)
    def _train_op(self, fresh_graph):
        self.runs = session_loops.Runs(2)
        self.w = v1.get_variable("w", initializer=1.0)
        self.other = v1.get_variable("other", initializer=1.0, trainable=False)
        apply = self.runs.accumulating(
            v1.train.GradientDescentOptimizer.apply_gradients
        )
        pairs = sgd().compute_gradients(self.w**2)
        self.train_op = apply(sgd(), pairs, v1.train.get_or_create_global_step())

    def _check(self, *fetches):
        graph = v1.get_default_graph()
        self.runs._check(graph, [getattr(fetch, "op", fetch) for fetch in fetches])

    def _refusal(self, capsys, *fetches) -> str:
        with pytest.raises(SystemExit) as ended:
            self._check(*fetches)
        assert ended.value.code == 2 == self.runs.exit_code()
        return capsys.readouterr().err

    def test_an_average_behind_the_train_op_is_refused(self, capsys):
        average = tf.train.ExponentialMovingAverage(0.5)
        with tf.control_dependencies([self.train_op]):
            applied = average.apply([self.w])
        said = self._refusal(capsys, applied)
        assert re.search(
            "2 times per update. Received: w/ExponentialM.*, written", said
        )

    def test_a_step_that_is_counted_by_hand_is_refused(self, capsys):
        step = v1.train.get_global_step()
        train_op = tf.group(self.train_op, step.assign_add(1))
        assert "Received: global_step, written by" in self._refusal(capsys, train_op)

    def test_a_loop_that_accumulates_by_itself_is_refused(self, capsys):
        optimizer = AccumulatingOptimizer(sgd(), 2)
        other = optimizer.minimize(self.w**2)
        said = self._refusal(capsys, self.train_op, other)
        assert "must not accumulate by itself" in said

    def test_registered_updates_are_named(self, caplog):
        update = self.other.assign(0.5)
        v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, update)
        self._check(self.train_op, update)
        self._check(self.train_op, update)
        (message,) = caplog.messages
        assert message.endswith("with every call of session.run, not per update: other")

    def test_writes_of_other_calls_are_named_after_the_first_update(self, caplog):
        copy = self.other.assign(self.w)
        self._check(copy, self.other.initializer, v1.global_variables_initializer())
        assert self.runs.exit_code() == 1  # nothing was trained
        self._check(self.train_op)
        self._check(copy, self.w.initializer, v1.global_variables_initializer())
        (message,) = caplog.messages
        assert message.endswith("do not train, which do not count updates: other")
        assert self.runs.exit_code() == 0

    def test_metrics_and_random_states_are_the_scripts(self, caplog):
        _, metric = v1.metrics.mean(self.w)
        generator = tf.random.Generator.from_seed(1)
        self._check(self.train_op, metric, generator.normal([]))
        assert not caplog.messages
