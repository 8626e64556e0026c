"""`estimator-accum check` tells scripts that may be cut from those that may not."""

import itertools
import re

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum.graph import internals
from estimator_accum.unedited.comparison import (
    _without_order,
    check_instead_of_training,
    report,
)
from estimator_accum.unedited.loop_comparison import join_calls
from tests.helpers.models.microbatch_runs import (
    hidden_layer,
    make_data,
    output_layer,
    save_step,
    spec_of,
)
from tests.helpers.processes import legacy_runs

v1 = tf.compat.v1
_RUNS = itertools.count()


def _input_fn():
    features = {"x": make_data(48)[0]}
    labels = make_data(48)[1]
    data = tf.data.Dataset.from_tensor_slices((features, labels))
    return data.shuffle(48).batch(16)


def _model_fn(loss_of):
    def model_fn(features, labels, mode):
        hidden = hidden_layer(features["x"])
        loss = loss_of(hidden, labels)
        optimizer = v1.train.AdamOptimizer(0.01)
        train_op = optimizer.minimize(loss, v1.train.get_global_step())
        return spec_of(mode, loss, train_op)

    return model_fn


def _mean(hidden, labels):
    return tf.reduce_mean(tf.square(output_layer(hidden) - labels))


def _divided_by_a_constant(hidden, labels):
    return tf.reduce_sum(tf.square(output_layer(hidden) - labels)) / 16.0


def _normalized(hidden, labels):
    return _mean(v1.layers.batch_normalization(hidden, training=True), labels)


def _against_others(hidden, labels):
    scores = tf.matmul(hidden, hidden * output_layer(hidden), transpose_b=True)
    others = tf.nn.log_softmax(scores + 0.0 * labels)
    return -tf.reduce_mean(tf.linalg.diag_part(others))


def _dropped(hidden, labels):
    return _mean(tf.nn.dropout(hidden, 0.5), labels)


def _clipped_backwards(hidden, labels):
    """Combines examples in a tf.custom_gradient, unseen in the forward pass."""

    @tf.custom_gradient
    def identity(x):
        return tf.identity(x), lambda dy: tf.clip_by_norm(dy, 0.1)

    return _mean(identity(hidden), labels)


def _noisy(hidden, labels):
    return _mean(hidden + 0.1 * tf.random.normal(tf.shape(hidden)), labels)


def _sampled(hidden, labels):
    drawn = tf.random.categorical(tf.stop_gradient(hidden), 1)
    return _mean(hidden + tf.cast(drawn, tf.float32), labels)


def _on_a_gpu(hidden, labels):
    """Trains without a GPU, for Estimator's sessions have soft placement."""
    with tf.device("/gpu:0"):
        return _mean(hidden, labels)


def _counted(hidden, labels):
    """Is another loss in each run, without a random number."""
    number = tf.numpy_function(lambda: np.float32(next(_RUNS)), [], tf.float32)
    return number * _mean(hidden, labels)


@pytest.fixture
def begin(monkeypatch, own_sessions):
    """Returns a function that has trainings compared during the test."""

    def check(*arguments):
        for place in (internals.train_of_estimator(), internals.call_of_train()):
            monkeypatch.setattr(*place, getattr(*place))
        return check_instead_of_training(2, *arguments, is_forced=True)

    return check


@pytest.fixture
def check(begin, capsys, tmp_path):
    """Returns a function that gives (exit code, output) for a model_fn."""

    def run(model_fn, input_fn=_input_fn, precision="float32") -> tuple[int, str]:
        begin(precision)
        estimator = tf.estimator.Estimator(model_fn, str(tmp_path))
        with pytest.raises(SystemExit) as ended:
            estimator.train(input_fn, max_steps=100)
        assert not list(tmp_path.iterdir())
        return ended.value.code, capsys.readouterr().out

    return run


_CHECKED = {
    "mean": (_mean, 0, r"verdict: equal up to rounding, all \d+ variables$"),
    "dropout": (_dropped, 0, r"verdict: equal up to rounding"),
    "constant": (_divided_by_a_constant, 0, r"verdict: equal up to rounding"),
    "batch_normalization": (_normalized, 0, r"verdict: equal up to rounding"),
    "in_batch_negatives": (_against_others, 0, r"verdict: equal up to rounding"),
    "device": (_on_a_gpu, 0, r"verdict: equal up to rounding"),
    "own_gradient": (_clipped_backwards, 2, r"^verdict: refused\. A tf\.custom_gradie"),
    "not_deterministic": (
        _counted,
        1,
        r"^verdict: undecided. The script is not deterministic: .* \d+ of \d+ var",
    ),
    "noise": (_noisy, 1, r"verdict: undecided, .*: random_normal/Ra"),
    "sampled": (_sampled, 1, r"verdict: undecided, .*: categorical/Mul"),
}


@pytest.mark.parametrize("name", _CHECKED)
def test_a_planted_mistake_is_found(name, check):
    loss_of, expected, sentence = _CHECKED[name]
    code, said = check(_model_fn(loss_of))
    assert code == expected, said
    assert re.search(sentence, said.rstrip())
    if name != "not_deterministic" and expected < 2:
        columns = ["variable", "order", "in", "2", "in", "8", "verdict"]
        assert said.splitlines()[0].split() == columns


def test_what_rounding_alone_moves_is_not_called_different(capsys):
    """A key's bias, say, which adds one number to all scores of a softmax."""
    start = {"bias": np.zeros(2), "weights": np.zeros(2), "counts": np.array(3)}
    whole = {"bias": np.ones(2), "weights": np.ones(2), "counts": np.array(4)}
    order = whole | {"bias": np.full(2, 1.1)}
    cut = whole | {"bias": np.full(2, 3.0)}
    assert report(start, whole, {"order": order, "in 2": cut}, []) == 0
    said = capsys.readouterr().out
    assert re.search(r"\nbias +1e-01 +2e\+00  only rounding moves it\n", said)
    assert said.endswith("equal up to rounding, all 3 variables\n")
    cut["weights"] = np.full(2, 1.002)
    assert report(start, whole, {"order": order, "in 2": cut}, []) == 1
    assert "verdict: different, 1 of 3" in capsys.readouterr().out


def test_reads_and_writes_without_an_order_leave_the_verdict_open(fresh_graph, capsys):
    step, batch = v1.train.create_global_step(), tf.zeros([4])
    rate = 1 / tf.cast(step, tf.float32)
    weight = v1.get_variable("w", [4])
    early, late = step.assign(step + 1), weight.assign_sub(rate * batch)
    (sentence,) = _without_order(tf.group(early, late), [batch])
    assert re.match(
        "global_step is read by .* and written by Assign.*, in no", sentence
    )
    with tf.control_dependencies([rate]):
        ordered = step.assign(step + 1)
    assert not _without_order(tf.group(ordered, late), [batch])
    start, whole, cut = ({"w": np.full(2, n)} for n in (0.0, 1.0, 2.0))
    assert report(start, whole, {"in 2": cut}, [], [sentence]) == 1
    said = capsys.readouterr().out
    assert re.search("undecided, for 1 of 1 .* leaves open .*\n.*in no order", said)
    assert report(start, whole, {"in 2": whole}, [], [sentence]) == 0


_NAN = np.array([np.nan, 1.0])


@pytest.mark.parametrize(
    ("whole", "cut", "row", "verdict"),
    [
        (np.ones(2), _NAN, "DIFFERENT", "different, 1 of 1"),
        (_NAN, np.ones(2), "DIFFERENT", "different, 1 of 1"),
        (_NAN, _NAN[::-1], "DIFFERENT", "different, 1 of 1"),
        (_NAN, _NAN, "NaN or infinite in both", "undecided, for 1 of 1 variables are "),
        (np.array(9), np.array(2), "DIFFERENT", "different, 1 of 1"),
        (np.array(True), np.array(False), "DIFFERENT", "different, 1 of 1"),
    ],
)
def test_nan_counts_and_flags_are_compared(whole, cut, row, verdict, capsys):
    start = {"x": np.zeros_like(whole)}
    orders = {"order": {"x": whole}, "in 2": {"x": cut}}
    with np.errstate(invalid="ignore"):
        assert report(start, {"x": whole}, orders, []) == 1
    said = capsys.readouterr().out
    assert re.search(rf"\nx .*  {row}\n", said)
    assert f"verdict: {verdict}" in said


def test_sparse_features_are_compared(check):
    def input_fn():
        def sparse(features, labels):
            return {"x": tf.sparse.from_dense(features["x"])}, labels

        return _input_fn().map(sparse)

    def model_fn(features, labels, mode):
        x = tf.ensure_shape(tf.sparse.to_dense(features["x"]), [None, 5])
        return _model_fn(_mean)({"x": x}, labels, mode)

    code, said = check(model_fn, input_fn)
    assert code == 0, said
    assert said.split()[:3] == ["variable", "in", "2"]  # no other order


def test_the_command_ends_where_training_would_begin(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, tensorflow as tf\n"
        "def model_fn(features, labels, mode):\n"
        "    w = tf.compat.v1.get_variable('w', initializer=0.0)\n"
        "    loss = tf.reduce_mean(tf.square(w - features))\n"
        "    optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.1)\n"
        "    step = tf.compat.v1.train.get_global_step()\n"
        "    train_op = optimizer.minimize(loss, step)\n"
        "    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)\n"
        "def input_fn():\n"
        "    x = tf.data.Dataset.range(int(sys.argv[1]))\n"
        "    return x.map(lambda x: tf.cast(x, tf.float32)).batch(4)\n"
        "tf.estimator.Estimator(model_fn, 'model').train(input_fn)\n"
        "print('trained')\n"
    )
    command = ["-m", "estimator_accum", "check", "--updates=1", script, "8"]
    done = legacy_runs.run_python(None, *command, cwd=tmp_path)
    assert done.returncode == 0, done.output
    assert "trained" not in done.stdout + done.stderr
    assert done.stdout.endswith("verdict: equal up to rounding, all 2 variables\n")


def test_a_finished_training_has_no_verdict(begin, tmp_path, capsys):
    exit_code = begin()
    save_step(tmp_path)
    estimator = tf.estimator.Estimator(_model_fn(_mean), str(tmp_path))
    estimator.train(_input_fn, max_steps=1)
    assert exit_code() == 1
    said = (
        "no verdict: the Estimator is trained already, up to its last step. Give it an"
    )
    assert capsys.readouterr().out.startswith(said)


def test_effect_of_a_precision_is_printed_and_does_not_decide(check):
    code, printed = check(_model_fn(_mean), precision="bfloat16")
    assert "--precision=bfloat16 changes the updates by a median of" in printed
    assert (code, "verdict: equal up to rounding" in printed) == (0, True)


_LOOP = """
import sys
import numpy as np
import tensorflow as tf
way = sys.argv[1]
tf = tf.compat.v1
tf.disable_eager_execution()
x = tf.placeholder(tf.float32, [None, 3])
tf.set_random_seed(1)
scale = tf.placeholder_with_default(1.0, [])
if way == "pipeline":
    data = tf.data.Dataset.from_tensor_slices(np.sin(np.arange(72.0, dtype="f")))
    x = data.batch(3).batch(4).make_one_shot_iterator().get_next()
w = tf.get_variable("w", [3, 1])
reduce = tf.reduce_sum if way == "sum" else tf.reduce_mean
loss = scale * reduce((tf.nn.dropout(tf.matmul(x, w), rate=0.5) - 1) ** 2)
train_op = tf.train.MomentumOptimizer(0.01, 0.9).minimize(
    loss, tf.train.get_or_create_global_step())
with tf.train.MonitoredTrainingSession() as session:
    for i in range(2 if way == "short" else 100):
        batch = np.sin(np.arange(12.0) + i).reshape(4, 3)
        rate = float(i) if way == "rate" else 2.0
        feeds = {} if way == "pipeline" else {x: batch, scale: rate}
        session.run([train_op, loss], feeds)
print("trained")
"""


@pytest.mark.parametrize(
    ("way", "code", "said"),
    [
        ("mean", 0, "verdict: equal up to rounding, all 3 variables"),
        ("pipeline", 0, "verdict: equal up to rounding, all 3 variables"),
        (
            "sum",
            1,
            "verdict: different, 2 of 3 variables.*a loss that is not the mean",
        ),
        (
            "rate",
            2,
            "verdict: refused.*Received: PlaceholderWithDefault:0 of shape",
        ),
        ("short", 1, "no verdict: 4 calls .*, and the script made 2"),
    ],
)
def test_a_session_loop_is_compared_with_larger_batches(way, code, said, tmp_path):
    (tmp_path / "loop.py").write_text(_LOOP)
    flags = ["check", "--gradient_accumulation_steps=2", "loop.py", way]
    done = legacy_runs.run_python(None, "-m", "estimator_accum", *flags, cwd=tmp_path)
    assert done.returncode == code, done.output
    assert re.search(said, done.stdout)
    assert ("trained" in done.stdout.split()) == (way == "short")


def _queue(**options):
    return v1.train.batch([tf.zeros([3])], 8, **options)


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda: v1.placeholder(tf.float32, [8, 3]), "Give its placeholder None"),
        (_queue, r"\(8, 3\)\. Pass allow_smaller_final_batch=True to tf\.train\.batch"),
        (
            lambda: v1.data.make_one_shot_iterator(
                tf.data.Dataset.from_tensors([1.0]).batch(8, drop_remainder=True)
            ).get_next(),
            "Batch with drop_remainder=False",
        ),
    ],
)
def test_examples_in_a_fixed_number_are_refused_with_a_remedy(
    make, remedy, fresh_graph
):
    tensor = make()
    calls = [{tensor: np.full(tensor.shape.as_list(), i)} for i in range(2)]
    with pytest.raises(ValueError, match=rf"in no fixed number.*{remedy}"):
        join_calls(calls)


def test_a_queue_with_a_smaller_final_batch_is_joined(fresh_graph):
    tensor = _queue(allow_smaller_final_batch=True)
    joined = join_calls([{tensor: np.full([8, 3], i)} for i in range(2)])
    assert joined["whole"][tensor].shape == (16, 3)
