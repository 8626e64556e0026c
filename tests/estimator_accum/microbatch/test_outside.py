"""Uses of a cut batch by hooks or outer model_fns get all of it.

A case is a model_fn around the one that is cut. All run it, and a hook that fetches
what it has put into the collection "fetched", on three batches, cut in 4 and at once.
"""

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import (
    AccumulatingOptimizer,
    make_accumulating_train_op,
    per_example,
    whole_batch_loss,
)
from estimator_accum.microbatch.histograms import sum_of_histograms
from estimator_accum.microbatch.runner import BatchRunner
from tests.helpers.models.interception import cut
from tests.helpers.models.microbatch_runs import train
from tests.helpers.models.summaries import read_scalars
from tests.helpers.tables import first

v1 = tf.compat.v1
_MODES = tf.estimator.ModeKeys
_TRAIN, _EVAL, _PREDICT = _MODES.TRAIN, _MODES.EVAL, _MODES.PREDICT
_numbers = np.random.default_rng(0)
_X = _numbers.normal(size=[39, 3]).astype(np.float32)
_Y = _numbers.normal(size=[39, 2]).astype(np.float32)
_TRAIN_OPS = {
    "own": lambda loss, sgd, step: sgd.minimize(loss, step),
    "declared": lambda loss, sgd, step: make_accumulating_train_op(loss, sgd, 1),
    "optimizer": lambda loss, sgd, step: AccumulatingOptimizer(sgd, 1).minimize(
        loss, step
    ),
}
_CASES, _REFUSED = {}, {}


def _case(mode):
    def add(outer):
        _CASES[outer.__name__[1:]] = outer, mode
        return outer

    return add


def _refused(sentence):
    def add(outer):
        _REFUSED[outer.__name__[1:]] = outer, sentence
        return outer

    return add


def _inner(way):
    def model_fn(features, labels, mode):
        kernel = v1.get_variable("kernel", [3, 2], initializer=_start(3))
        scores = tf.tanh(tf.matmul(features["x"], kernel), name="scores")
        step = tf.cast(v1.train.get_global_step(), tf.float32)
        scaled = features["scale"] * step
        _fetch(scaled)
        if mode == _PREDICT:
            return tf.estimator.EstimatorSpec(mode, predictions={"scores": scores})
        loss = tf.reduce_mean(tf.square(scores - labels))
        train_op = None
        if mode == _TRAIN:
            rate = v1.placeholder_with_default(0.1, [], "rate")
            factor = v1.placeholder_with_default(1.0, [], "factor")
            sgd, step = (
                v1.train.GradientDescentOptimizer(rate),
                v1.train.get_global_step(),
            )
            with tf.control_dependencies([scaled]):  # a plain run has no order
                train_op = _TRAIN_OPS[way](factor * loss, sgd, step)
        return tf.estimator.EstimatorSpec(mode, {"scores": scores}, loss, train_op)

    return model_fn


def _start(seed):
    return v1.random_normal_initializer(seed=seed)


def _variable(name, shape=()):
    zero = v1.zeros_initializer()
    return v1.get_variable(name, shape, initializer=zero, trainable=False)


def _fetch(*tensors):
    for tensor in tensors:
        v1.add_to_collection("fetched", tensor)


class _Hook(v1.train.SessionRunHook):
    def __init__(self):
        self.values = []

    def before_run(self, run_context):
        feeds = None
        if v1.get_collection("fed"):
            feeds = dict(zip(("rate:0", "factor:0"), v1.get_collection("fed")))
        return v1.train.SessionRunArgs(v1.get_collection("fetched"), feeds)

    def after_run(self, run_context, run_values):
        self.values.append(run_values.results)


@_case(_TRAIN)
def _values_of_the_batch(spec, features, labels):
    scores = spec.predictions["scores"]
    right = tf.equal(tf.argmax(scores, 1), tf.argmax(labels, 1))
    _fetch(scores, scores * features["x"][:, :2], features["name"])
    _fetch(tf.reduce_mean(tf.cast(right, tf.float32)), spec.loss, tf.shape(scores))
    return spec


@_case(_TRAIN)
def _operations_on_the_batch(spec, features, labels):
    mean, count = _variable("mean", [2]), _variable("count")
    moved = mean.assign(0.5 * mean + tf.reduce_sum(spec.predictions["scores"], 0))
    counted = count.assign_add(tf.cast(tf.size(labels), tf.float32))
    _fetch(tf.group(moved, counted), counted)
    return spec


@_case(_TRAIN)
def _operations_beside_the_train_op(spec, features, labels):
    count, average = _variable("count"), _variable("average")
    with tf.control_dependencies([features["x"], spec.loss]):
        counted = count.assign_add(tf.reduce_sum(features["x"]))
    averaged = average.assign(0.5 * average + 0.5 * spec.loss)
    scores = spec.predictions["scores"]
    means = [v1.metrics.mean(values)[1] for values in (features["x"], scores)]
    return spec._replace(train_op=tf.group(spec.train_op, counted, averaged, *means))


@_case(_TRAIN)
def _loss_and_summaries(spec, features, labels):
    v1.summary.histogram("scores", tf.round(8 * spec.predictions["scores"]))
    v1.summary.scalar("mean", tf.reduce_mean(features["x"]))
    _fetch(v1.summary.merge_all())
    return spec._replace(loss=spec.loss + tf.reduce_mean(labels))


@_case(_TRAIN)
def _numbers_that_a_hook_feeds(spec, features, labels):
    for value in (0.5, 0.25):
        v1.add_to_collection("fed", value)
    return spec


@_case(_EVAL)
def _metrics(spec, features, labels):
    scores = spec.predictions["scores"]
    metrics = {
        "x": v1.metrics.mean(features["x"]),
        "accuracy": v1.metrics.accuracy(tf.argmax(labels, 1), tf.argmax(scores, 1)),
        "loss": v1.metrics.mean(spec.loss),
    }
    _fetch(scores, *(update for _, update in metrics.values()))
    return spec


@_case(_PREDICT)
def _forwarded_features(spec, features, labels):
    scores = spec.predictions["scores"]
    more = {
        "name": features["name"],
        "twice": 2 * scores,
        "x": scores * features["x"][:, :2],
    }
    return spec._replace(predictions=spec.predictions | more)


@_refused("batch's own run. Received: another run, of scores, which needs")
def _another_run(spec, features, labels):
    class Hook(v1.train.SessionRunHook):
        def after_run(self, run_context, run_values):
            run_context.session.run("scores:0")

    return spec._replace(training_hooks=[*spec.training_hooks, Hook()])


@_refused("must not be fed, for .* Received: scores:0. Feed a tensor of input_fn")
def _fed_scores(spec, features, labels):
    hook = v1.train.FeedFnHook(lambda: {"scores:0": np.zeros([16, 2])})
    return spec._replace(training_hooks=[*spec.training_hooks, hook])


@_refused(
    "not take another batch from the input pipeline. Received: late, which needs I"
)
def _late_wait(spec, features, labels):
    class Hook(v1.train.SessionRunHook):
        def begin(self):
            with tf.control_dependencies([features["x"]]):
                _fetch(tf.no_op("late"))

    return spec._replace(training_hooks=[*spec.training_hooks, Hook()])


def _batches():
    names = np.array([f"name {i}" for i in range(39)])
    data = tf.data.Dataset.from_tensor_slices(({"x": _X, "name": names}, _Y)).batch(16)
    data = data.map(lambda x, y: (x | {"scale": tf.reduce_mean(y)}, y))
    return v1.data.make_one_shot_iterator(data).get_next()


def _run(outer, mode, model_fn):
    with tf.Graph().as_default():
        v1.set_random_seed(7)
        v1.train.get_or_create_global_step()
        features, labels = _batches()
        spec = outer(model_fn(features, labels, mode=mode), features, labels)
        hook, results = _Hook(), []
        hooks = (*spec.training_hooks, *spec.evaluation_hooks, *spec.prediction_hooks)
        run = [spec.loss, *([spec.train_op] if mode == _TRAIN else [])]
        run = spec.predictions if mode == _PREDICT else run
        with v1.train.SingularMonitoredSession([*hooks, hook]) as session:
            raw = session.raw_session()
            variables = {v.op.name: v for v in _variables()}
            while not session.should_stop():
                try:
                    results.append(session.run(run))
                except tf.errors.OutOfRangeError:
                    return raw.run(variables), hook.values, results


def _variables():
    variables = [*v1.global_variables(), *v1.local_variables()]
    return [v for v in variables if "update_step" not in v.name]


def _assert_same(ours, theirs):
    assert len(theirs[2]) == len(ours[2]) == 3
    for result, expected in zip(ours, theirs, strict=True):
        pairs = zip(tf.nest.flatten(result), tf.nest.flatten(expected), strict=True)
        for value, plain in pairs:
            assert type(value) is type(plain)
            if np.asarray(plain).dtype.kind == "f":
                np.testing.assert_allclose(value, plain, 1e-5, 1e-6)
            else:
                np.testing.assert_array_equal(value, plain)


def _names(*modes):
    return [name for name, (_, mode) in _CASES.items() if mode in modes]


_FIRST = {("values_of_the_batch", "own"), ("operations_on_the_batch", "own")}
_FIRST |= {("operations_beside_the_train_op", "declared")}
_FIRST |= {("loss_and_summaries", "optimizer"), ("numbers_that_a_hook_feeds", "own")}


@pytest.mark.parametrize(
    ("name", "way"), first(itertools.product(_names(_TRAIN), _TRAIN_OPS), _FIRST)
)
def test_what_is_fetched_in_training_is_of_the_whole_batch(name, way):
    outer, mode = _CASES[name]
    theirs = _run(outer, mode, _inner(way))
    _assert_same(_run(outer, mode, cut(_inner(way))), theirs)


@pytest.mark.parametrize("name", _names(_EVAL, _PREDICT))
def test_what_is_fetched_in_other_modes_is_of_the_whole_batch(name, tmp_path):
    outer, mode = _CASES[name]
    for job in ("eval", "predict"):
        (tmp_path / f"micro_batches-{job}.json").write_text('{"micro_batches": 4}')
    config = tf.estimator.RunConfig(str(tmp_path))
    model_fn = functools.partial(cut(_inner("own"), "auto"), config=config)
    _assert_same(_run(outer, mode, model_fn), _run(outer, mode, _inner("own")))


@pytest.mark.parametrize("name", _REFUSED)
def test_what_would_not_be_of_the_whole_batch_is_refused(name):
    outer, sentence = _REFUSED[name]
    with pytest.raises(ValueError, match=sentence):
        _run(outer, _TRAIN, cut(_inner("own")))


@pytest.mark.parametrize("way", ["own", "declared"])
def test_a_micro_batch_that_reads_the_input_pipeline_is_refused(way):
    def outer(features, labels, mode):
        mean = tf.reduce_mean(features["x"], 0)

        def inner(features, labels, mode):
            features = features | {"x": features["x"] - mean}
            return _inner(way)(features, labels, mode)

        return cut(inner)(features, labels, mode=mode)

    sentence = "computed from the features and labels of its model_fn.* needs Mean"
    with pytest.raises(ValueError, match=sentence):
        _run(lambda spec, *_: spec, _TRAIN, outer)


class _AtEnd(v1.train.SessionRunHook):
    """Fetches tensors of a batch in a run of its own, when training has ended."""

    def __init__(self, fetch, is_early=False):
        self._fetch, self._is_early = fetch, is_early

    def after_run(self, run_context, run_values):
        if self._is_early:
            run_context.session.run(self._fetch)

    def end(self, session):
        self.values = session.run(self._fetch)


def _with_tensors(way, cut_in=None):
    """Returns a model_fn that collects tensors, cut or not."""

    def model_fn(features, labels, mode):
        spec = _inner(way)(features, labels, mode)
        scores = spec.predictions["scores"]
        mean = tf.reduce_mean(tf.square(scores) * features["x"][:, :2])
        for tensor in (spec.loss, scores, mean):
            v1.add_to_collection("of the model", tensor)
        return spec

    return model_fn if cut_in is None else cut(model_fn, cut_in)


def _train_constant(hooks_of, model_fn):
    """Trains three updates on one batch, which an iterator repeats."""
    with tf.Graph().as_default():
        v1.set_random_seed(7)
        v1.train.get_or_create_global_step()
        data = tf.data.Dataset.from_tensors(({"x": _X[:16], "scale": 1.0}, _Y[:16]))
        features, labels = v1.data.make_one_shot_iterator(data.repeat()).get_next()
        spec = model_fn(features, labels, mode=_TRAIN)
        tensors = v1.get_collection("of the model")
        fetches = dict(zip(("loss", "scores", "mean"), tensors, strict=True))
        fetches |= {"x": features["x"], "step": v1.train.get_global_step()}
        first, *_ = hooks = [*hooks_of(fetches), *spec.training_hooks]
        with v1.train.SingularMonitoredSession(hooks) as session:
            for _ in range(3):
                session.run(spec.train_op)
        return first


@pytest.mark.parametrize("cut_in", [1, 4])
@pytest.mark.parametrize("way", _TRAIN_OPS)
def test_a_hook_reads_the_last_batch_at_the_end(way, cut_in):
    """A plain run takes another batch, which here is the same."""

    def train_with(model_fn):
        return _train_constant(lambda fetches: [_AtEnd(fetches)], model_fn).values

    theirs = train_with(_with_tensors(way))
    ours = train_with(_with_tensors(way, cut_in))
    assert theirs.keys() == ours.keys()
    for key, value in theirs.items():
        np.testing.assert_allclose(ours[key], value, 1e-5, 1e-6)
        assert type(ours[key]) is type(value)


@pytest.mark.parametrize("kind", ["logging", "final ops"])
def test_known_hooks_read_the_last_batch_at_the_end(kind):
    logged = []

    def hooks_of(fetches):
        if kind == "final ops":
            return [v1.train.FinalOpsHook(fetches)]
        return [
            v1.train.LoggingTensorHook(fetches, at_end=True, formatter=logged.append)
        ]

    def values_of(hook):
        return hook.final_ops_values if kind == "final ops" else logged.pop()

    theirs = values_of(_train_constant(hooks_of, _with_tensors("own")))
    ours = values_of(_train_constant(hooks_of, _with_tensors("own", 4)))
    for key, value in theirs.items():
        np.testing.assert_allclose(ours[key], value, 1e-5, 1e-6)


@pytest.mark.parametrize("is_resource", [True, False])
def test_a_streaming_metric_is_logged_at_the_end(is_resource):
    """It counts the last batch again, where a plain run counts another batch."""
    logged = []

    def model_fn(features, labels, mode):
        v1.get_variable_scope().set_use_resource(is_resource)
        spec = _with_tensors("own")(features, labels, mode)
        scores = spec.predictions["scores"]
        v1.metrics.mean(scores - labels, updates_collections="of the metric")
        return spec

    def train_with(model_fn):
        def hooks_of(fetches):
            (update,) = v1.get_collection("of the metric")
            options = {"every_n_iter": 2, "at_end": True, "formatter": logged.append}
            return [v1.train.LoggingTensorHook({"mean": update}, **options)]

        _train_constant(hooks_of, model_fn)
        return [logged.pop(0)["mean"] for _ in range(3)]

    theirs = train_with(model_fn)
    np.testing.assert_allclose(train_with(cut(model_fn)), theirs, 1e-5, 1e-6)


def _centered(way):
    """Returns a model_fn that combines examples before its loss, in two passes."""

    def model_fn(features, labels, mode):
        kernel = v1.get_variable("kernel", [3, 2], initializer=_start(3))
        hidden = tf.tanh(tf.matmul(features["x"], kernel))

        def combine(hidden):
            return tf.reduce_mean(tf.square(hidden - tf.reduce_mean(hidden, 0) - 0.1))

        is_cut = way == "whole_batch_loss"
        loss = whole_batch_loss(hidden, combine) if is_cut else combine(hidden)
        sgd, step = v1.train.GradientDescentOptimizer(0.1), v1.train.get_global_step()
        train_op = _TRAIN_OPS["optimizer" if is_cut else way](loss, sgd, step)
        for tensor in (loss, hidden, hidden - loss):
            v1.add_to_collection("of the model", tensor)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    return model_fn


@pytest.mark.parametrize("cut_in", [1, 4])
@pytest.mark.parametrize("way", ["own", "whole_batch_loss"])
def test_a_hook_reads_a_loss_over_the_batch_at_the_end(way, cut_in):
    def train_with(model_fn):
        return _train_constant(lambda fetches: [_AtEnd(fetches)], model_fn).values

    theirs = train_with(_centered("own"))
    for key, value in train_with(cut(_centered(way), cut_in)).items():
        np.testing.assert_allclose(value, theirs[key], 1e-5, 1e-6)


def test_a_hook_that_trains_at_the_end_is_refused():
    def hooks_of(fetches):
        with tf.control_dependencies([fetches["loss"]]):
            moved = v1.assign_add(v1.train.get_global_step(), 1)
        return [_AtEnd(moved)]

    with pytest.raises(ValueError, match="must be fetched in the batch's own run"):
        _train_constant(hooks_of, _with_tensors("own", 4))


@pytest.mark.parametrize("name", ["loss", "train_op"])
@pytest.mark.parametrize("way", ["own", "declared"])
def test_a_hook_of_train_that_runs_a_batch_in_a_new_session_is_refused(
    way, name, tmp_path
):
    specs = []

    class Early(v1.train.SessionRunHook):
        def after_create_session(self, session, coord):
            session.run(v1.train.get_global_step())  # needs no batch
            session.run(getattr(specs[0], name))

    def model_fn(features, labels, mode):
        specs.append(cut(_inner(way))(features, labels, mode=mode))
        return specs[0]

    def input_fn():
        data = {"x": _X[:16], "scale": 1.0}, _Y[:16]
        return tf.data.Dataset.from_tensors(data)

    estimator = tf.estimator.Estimator(model_fn, str(tmp_path))
    sentence = r"must be fetched in the batch's own run\. .* of .*\. Return it from"
    with pytest.raises(ValueError, match=sentence):
        estimator.train(input_fn, hooks=[Early()])


def test_a_hook_reads_the_last_batch_though_the_data_has_ended():
    def with_hook(spec, features, labels):
        hooks.append(_AtEnd([spec.predictions["scores"], labels]))
        return spec._replace(training_hooks=[hooks[-1], *spec.training_hooks])

    hooks = []
    variables, _, _ = _run(with_hook, _TRAIN, cut(_inner("own")))
    scores, labels = hooks[0].values
    np.testing.assert_array_equal(labels, _Y[32:])
    expected = np.tanh(_X[32:] @ variables["kernel"])
    np.testing.assert_allclose(scores, expected, 1e-5, 1e-6)


def test_a_hook_that_traces_runs_is_told_that_it_sees_the_update_alone(
    tmp_path, caplog
):
    folder = str(tmp_path)
    _train_constant(
        lambda fetches: [v1.train.ProfilerHook(1, output_dir=folder)],
        _with_tensors("own", 4),
    )
    (message,) = (r.getMessage() for r in caplog.records if "traces" in r.getMessage())
    assert "the micro-batches run before" in message


@pytest.mark.parametrize(("width", "is_named"), [(2, False), (64, True)])
def test_a_fetched_tensor_of_more_numbers_than_the_batch_has_is_named(
    width, is_named, caplog
):
    def with_fetched(spec, features, labels):
        table = tf.ones([2, width])
        hidden = tf.matmul(spec.predictions["scores"], table, name="hidden")
        of_labels = tf.reduce_max(labels, name="of_labels")
        v1.summary.histogram("histogram", tf.identity(hidden))  # is added up
        _fetch(
            v1.summary.merge_all(), tf.reduce_max(hidden, name="of_hidden"), of_labels
        )
        return spec

    def model_fn(features, labels, mode):
        return with_fetched(_inner("own")(features, labels, mode), features, labels)

    _run(lambda spec, *_: spec, _TRAIN, cut(model_fn))
    messages = [r.getMessage() for r in caplog.records if "all rows" in r.getMessage()]
    assert len(messages) == is_named
    assert not messages or "for of_hidden:0, hidden:0 of shape [16," in messages[0]


def test_histograms_of_parts_add_up_to_that_of_all():
    numbers = np.random.default_rng(0)
    batches = [
        numbers.lognormal(0, 20, 30),
        numbers.integers(-3, 4, 30) * 1.0,
        np.maximum(numbers.normal(size=30), 0),
        np.zeros(30),
    ]
    with tf.Graph().as_default(), v1.Session() as session:
        values = v1.placeholder(tf.float64, [None])
        summary = v1.summary.histogram("of_values", values)
        for batch in batches:
            ours, theirs = (
                v1.Summary.FromString(sum_of_histograms(parts)).value[0].histo
                for parts in (
                    [session.run(summary, {values: x}) for x in np.split(batch, cuts)]
                    for cuts in ([1, 1, 20], [])
                )
            )
            assert (ours.min, ours.max, ours.num) == (theirs.min, theirs.max, 30)
            assert ours.bucket_limit == theirs.bucket_limit
            assert ours.bucket == theirs.bucket
            for name in ("sum", "sum_squares"):
                np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name))


def test_a_value_that_runs_out_of_memory_is_named():
    def fail(scores):
        raise MemoryError

    def model_fn(features, labels, mode):
        spec = _inner("own")(features, labels, mode)
        scores = spec.predictions["scores"]
        failing = tf.numpy_function(fail, [scores], tf.float32, name="failing")
        _fetch(tf.identity(failing, "hook"), tf.reduce_max(labels, name="of_labels"))
        return spec

    with pytest.raises(ValueError, match=r"memory\. Received: (hook|failing):0 at upd"):
        _run(lambda spec, *_: spec, _TRAIN, cut(model_fn))


def test_a_shape_that_is_fetched_computes_no_rows_of_the_whole_batch():
    sizes = []

    def note(rows):
        sizes.append(len(rows))
        return rows

    def model_fn(features, labels, mode):
        spec = _inner("own")(features, labels, mode)
        scores = spec.predictions["scores"]
        noted = tf.numpy_function(note, [scores], tf.float32, stateful=False)
        noted = per_example(tf.ensure_shape(noted, scores.shape))
        _fetch(
            tf.cast(tf.shape(noted)[0], tf.float32) * spec.loss, tf.zeros_like(noted)
        )
        return spec

    _run(lambda spec, *_: spec, _TRAIN, cut(model_fn))
    assert max(sizes) <= 4


def test_summaries_collect_rows_when_they_are_due_alone(monkeypatch, tmp_path):
    collected, run = [], BatchRunner.run

    def record(runner, session, place, taken, fetches):
        collected.extend([tensor.name for tensor in rows] for rows in fetches)
        return run(runner, session, place, taken, fetches)

    def hooks_of(fetches):
        v1.summary.histogram("of_scores", fetches["scores"])
        options = {"output_dir": str(tmp_path), "summary_op": v1.summary.merge_all()}
        return [v1.train.SummarySaverHook(save_steps=2, **options)]

    monkeypatch.setattr(BatchRunner, "run", record)
    _train_constant(hooks_of, _with_tensors("own", 4))
    assert collected == [["of_scores:0"], [], ["of_scores:0"]]  # no rows of scores


def test_the_summary_of_a_loss_that_combines_examples_fetches_no_rows(tmp_path, caplog):
    def model_fn(features, labels, mode):
        del labels
        kernel = v1.get_variable("kernel", [3, 32])
        hidden = tf.matmul(features, kernel)
        loss = tf.reduce_mean((hidden - tf.reduce_mean(hidden, 0)) ** 2)
        sgd = v1.train.GradientDescentOptimizer(0.1)
        train_op = sgd.minimize(loss, v1.train.get_global_step())
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    data = tf.data.Dataset.from_tensors
    train(cut(model_fn), tmp_path, lambda: data((_X, _Y)))
    assert "all rows" not in caplog.text
    assert len(read_scalars(tmp_path, "loss")) == 1
