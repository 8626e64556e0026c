"""`estimator-accum run`: scripts as they are, with their batches cut."""

import re

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum.run import __main__ as command
from estimator_accum.run._estimators import cut_batches
from tests.helpers.models.interception import relative_difference
from tests.helpers.models.microbatch_runs import (
    INPUT,
    make_model_fn,
    plain,
    train,
    variables_of,
    word_columns,
    words_input_fn,
)
from tests.helpers.processes import legacy_runs

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
    assert "in as few micro-batches as fit in memory" in done.stderr
    module = _run("-m", "script", "--its=flag", cwd=script.parent)
    assert module.returncode == 7
    assert module.stdout.endswith("['--its=flag']\n")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("", r"A Python script must be given\. Received: none\."),
        ("no_such.py", r"A Python script must be given\. Received: no_such\.py\."),
        (
            "--micro_batches=0 x",
            r"must be an integer >= 1\. Received: 0\. Or use auto\.",
        ),
        ("--reduction=max x", r"--reduction: invalid choice: 'max'"),
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
    assert re.search(rf"{sentence}.*Try --help\.\n$", said)


@pytest.fixture
def _cut(monkeypatch):
    """Cuts the batches of all Estimators during the test."""
    kind = v1.estimator.Estimator
    monkeypatch.setattr(kind, "_call_model_fn", kind._call_model_fn)
    cut_batches(3, "auto")


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
    """An estimator made of another one's model_fn."""
    model_fn = make_model_fn(plain("sgd"))
    inner = tf.estimator.Estimator(model_fn, config=_config(folder))
    estimator = tf.estimator.Estimator(inner.model_fn, config=_config(folder))
    estimator.train(INPUT, max_steps=2)
    return variables_of(estimator)


def _train_own(folder) -> dict[str, np.ndarray]:
    return train(make_model_fn(plain("adam")), folder, INPUT)


_ESTIMATORS = [_train_own, _train_canned, _train_by_spec, _train_added_metrics]


@pytest.mark.parametrize("trained", _ESTIMATORS)
def test_every_kind_of_estimator_is_cut_and_trains_as_before(
    trained, tmp_path, request
):
    theirs = trained(tmp_path / "whole")
    request.getfixturevalue("_cut")
    ours = trained(tmp_path / "cut")
    assert ours.keys() == theirs.keys()
    assert 0 < relative_difference(ours, theirs) <= 5e-6


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
