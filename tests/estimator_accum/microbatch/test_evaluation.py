"""Under "auto" an evaluation is that of the whole batches, in as little memory."""

import json
import logging
import types

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import batch_mean, get_windows, microbatch_model_fn
from estimator_accum.rows import guards
from tests.helpers.models import losses
from tests.helpers.models.little_memory import Memory
from tests.helpers.models.microbatch_runs import (
    INPUT,
    Fetch,
    by_train_op,
    embedding_layer,
    hidden_layer,
    input_fn_of,
    make_data,
    output_layer,
    plain,
    spec_of,
    word_columns,
    words_input_fn,
)
from tests.helpers.models.replicas import TWO_CPUS, two_replicas

pytestmark = pytest.mark.usefixtures("graph_optimizer")
v1 = tf.compat.v1
_PLENTY = types.SimpleNamespace(allocate=lambda x: x)
_SIZES = [16, 8, *[4] * 20, *[2, 2, 2, 1]]  # of 5 batches of 16 and one of 7


def _counter(name):
    collections = [v1.GraphKeys.LOCAL_VARIABLES]
    zero = v1.zeros_initializer()
    return v1.get_variable(name, [], tf.int64, zero, collections=collections)


def _metrics(labels, predicted):
    is_high, is_found = labels[:, 0] > 0, predicted[:, 0] > 0
    chance = tf.sigmoid(predicted[:, 0])
    counter = _counter("own")
    keras_mean, keras_auc = tf.keras.metrics.Mean(), tf.keras.metrics.AUC()
    keras_mean.update_state(predicted)
    keras_auc.update_state(is_high, chance)
    hits = tf.math.count_nonzero(is_found)
    return {
        "accuracy": v1.metrics.accuracy(is_high, is_found),
        "auc": v1.metrics.auc(is_high, chance),
        "class_accuracy": v1.metrics.mean_per_class_accuracy(is_high, is_found, 2),
        "mean": v1.metrics.mean(predicted),
        "keras_mean": keras_mean,
        "keras_auc": keras_auc,
        "own": (counter.read_value(), v1.assign_add(counter, hits)),
    }


_FLOATS = ("mean", "keras_mean", "loss", "average_loss", "prediction/mean")


def _model_fn(memory=_PLENTY, metrics=_metrics):
    """Returns a regression's model_fn with `metrics(labels, predicted)`."""

    def model_fn(features, labels, mode):
        predicted = output_layer(hidden_layer(memory.allocate(features["x"])))
        loss = tf.reduce_mean(tf.square(predicted - labels))
        train_op = None
        if mode == tf.estimator.ModeKeys.TRAIN:
            train_op = by_train_op("sgd")(loss)
        ops = metrics and metrics(labels, predicted)
        return spec_of(mode, loss, train_op, eval_metric_ops=ops)

    return model_fn


def _evaluate(model_fn, folder, input_fn=INPUT, config=None, **options):
    config = (config or tf.estimator.RunConfig()).replace(model_dir=str(folder))
    return tf.estimator.Estimator(model_fn, config=config).evaluate(input_fn, **options)


def _evaluate_auto(
    model_fn, folder, input_fn=INPUT, config=None, steps=None, begun_with=None, **more
):
    """Evaluates as after an earlier run that needed `begun_with` micro-batches."""
    _keep_number(folder, begun_with)
    model_fn = microbatch_model_fn(model_fn, "auto", **more)
    return _evaluate(model_fn, folder, input_fn, config, steps=steps)


def _keep_number(folder, number, *jobs):
    for job in jobs or ("eval",):
        if number is not None:
            folder.mkdir(exist_ok=True)
            file = folder / f"micro_batches-{job}.json"
            file.write_text(json.dumps({"micro_batches": number}))


def _assert_same(ours, theirs):
    """Asserts that counts are equal to the bit, and floating-point sums nearly so."""
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if name.split("/")[-1] in _FLOATS or name in _FLOATS:
            np.testing.assert_allclose(ours[name], value, 1e-6, 1e-7, err_msg=name)
        else:
            np.testing.assert_array_equal(ours[name], value, err_msg=name)


def _messages(caplog) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "tensorflow.estimator_accum"
    ]


def test_an_evaluation_that_does_not_fit_is_that_of_the_whole_batches(tmp_path, caplog):
    memory = Memory(lambda rows: rows <= 5)
    ours = _evaluate_auto(_model_fn(memory), tmp_path / "ours")
    assert memory.sizes == _SIZES
    _assert_same(ours, _evaluate(_model_fn(), tmp_path / "plain"))
    assert _messages(caplog) == [
        f"micro-batches {change}: out of memory at batch 1 of the evaluation; the batch "
        "is retried"
        for change in ("1 -> 2", "2 -> 4")
    ]


def test_a_whole_batch_that_fits_is_evaluated_to_the_bit(tmp_path):
    ours = _evaluate_auto(_model_fn(), tmp_path / "ours")
    assert ours == _evaluate(_model_fn(), tmp_path / "plain")
    assert not (tmp_path / "ours" / "micro_batches-eval.json").exists()


def test_only_so_many_batches_are_evaluated_as_asked_for(tmp_path):
    memory = Memory(lambda rows: rows <= 8)
    ours = _evaluate_auto(_model_fn(memory), tmp_path / "ours", steps=2)
    _assert_same(ours, _evaluate(_model_fn(), tmp_path / "plain", steps=2))
    assert memory.sizes == [16, 8, 8, 8, 8]


def test_the_numbers_of_training_and_evaluation_are_apart(tmp_path):
    memory = Memory(lambda rows: rows <= 8)
    model_fn = microbatch_model_fn(_model_fn(memory), "auto")
    estimator = tf.estimator.Estimator(model_fn, str(tmp_path))
    estimator.train(input_fn_of(16, 16))
    assert memory.sizes == [16, 8, 8]
    for sizes in ([32, 16, 8, 8, 8, 8], [8, 8, 8, 8]):
        memory.sizes.clear()
        estimator.evaluate(input_fn_of(32, 32))
        assert memory.sizes == sizes
    files = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))]
    assert files == [{"micro_batches": 4}, {"micro_batches": 2}]
    assert (tmp_path / "micro_batches-eval.json").exists()


def test_two_processes_may_keep_their_numbers_at_the_same_time(tmp_path, monkeypatch):
    rename = tf.io.gfile.rename

    def evaluate(at_once):
        memory = Memory(lambda rows: rows <= at_once)
        _evaluate_auto(_model_fn(memory), tmp_path, input_fn_of(16, 16))

    def other_first(*arguments, **options):
        monkeypatch.setattr(tf.io.gfile, "rename", rename)
        evaluate(8)
        rename(*arguments, **options)

    monkeypatch.setattr(tf.io.gfile, "rename", other_first)
    evaluate(4)
    (file,) = tmp_path.glob("micro_batches*")
    assert json.loads(file.read_text()) == {"micro_batches": 4}


def test_fewer_micro_batches_are_tried_after_batches_that_fit(tmp_path, caplog):
    memory = Memory(lambda rows: rows <= 8)
    with caplog.at_level(logging.INFO):
        _evaluate_auto(_model_fn(memory), tmp_path, begun_with=4, grow_after=2)
    assert memory.sizes == [4] * 8 + [8] * 4 + [16] + [8] * 2 + [4, 3]
    assert (
        "micro-batches 4 -> 2: fitted in memory 2 times, until batch 2 of the evaluat"
        in ("\n".join(_messages(caplog)))
    )


def test_one_example_that_does_not_fit_is_described(tmp_path):
    memory = Memory(lambda rows: False)
    expected = (
        r"must fit in memory\. .*x'\] \[5\], labels \[1\] at batch 1 of the evalu"
    )
    with pytest.raises(ValueError, match=expected):
        _evaluate_auto(_model_fn(memory), tmp_path)


def test_an_evaluation_without_metrics_has_its_loss(tmp_path):
    memory = Memory(lambda rows: rows <= 5)
    ours = _evaluate_auto(_model_fn(memory, metrics=None), tmp_path / "ours")
    _assert_same(ours, _evaluate(_model_fn(metrics=None), tmp_path / "plain"))
    assert ours.keys() == {"loss", "global_step"}


def test_a_loss_that_sums_over_examples_is_summed(tmp_path):
    def model_fn(features, labels, mode):
        predicted = output_layer(hidden_layer(features["x"]))
        return spec_of(mode, tf.reduce_sum(tf.square(predicted - labels)), None)

    more = {"reduction": "sum", "begun_with": 4}
    ours = _evaluate_auto(model_fn, tmp_path / "ours", **more)
    _assert_same(ours, _evaluate(model_fn, tmp_path / "plain"))


def test_batch_mean_weights_what_is_no_mean_over_examples(tmp_path):
    """It is a loss of tokens, a metric of the batch's loss, and the loss under "sum"."""

    def model_fn(features, labels, mode):
        predicted = output_layer(hidden_layer(features["x"]))
        tokens = 1.0 + tf.floor(tf.abs(features["x"][:, :1]) * 3)
        weight = tf.reduce_sum(tokens)
        loss = tf.reduce_sum(tokens * tf.square(predicted - labels)) / weight
        loss = batch_mean(loss, weight)
        ops = {"mean": v1.metrics.mean(loss)}
        return spec_of(mode, loss, None, eval_metric_ops=ops)

    theirs = _evaluate(model_fn, tmp_path / "plain")
    for reduction in ("mean", "sum"):
        more = {"reduction": reduction, "begun_with": 4}
        _assert_same(_evaluate_auto(model_fn, tmp_path / reduction, **more), theirs)


def test_updates_that_do_not_need_the_batch_run_once_a_batch(tmp_path):
    def metrics(labels, predicted):
        batches, micro_batches = _counter("batches"), _counter("micro_batches")
        with tf.control_dependencies([predicted]):
            count = v1.assign_add(micro_batches, 1)
        once = v1.assign_add(batches, 1)
        both = batches.read_value(), tf.group(tf.group(once), count)
        return {"batches": both, "micro": (micro_batches.read_value(), tf.no_op())}

    results = _evaluate_auto(_model_fn(metrics=metrics), tmp_path, begun_with=4)
    assert (results["batches"], results["micro"]) == (6, 24)


def test_a_number_of_the_micro_batch_counts_once_a_micro_batch(tmp_path):
    def metrics(labels, predicted):
        return {"highest": v1.metrics.mean(tf.reduce_max(labels))}

    results = _evaluate_auto(_model_fn(metrics=metrics), tmp_path, begun_with=4)
    _, labels = make_data(5 * 16 + 7)
    parts = [*np.split(labels[:80], 20), *np.split(labels[80:], [2, 4, 6])]
    expected = np.mean([part.max() for part in parts])
    np.testing.assert_allclose(results["highest"], expected, rtol=1e-6)


def test_a_metrics_value_that_needs_the_batch_is_refused(tmp_path):
    def metrics(labels, predicted):
        return {"now": (tf.reduce_mean(predicted), tf.no_op())}

    expected = (
        r"must be computed from variables.* Received: 'now', computed from a batc"
    )
    with pytest.raises(ValueError, match=expected):
        _evaluate_auto(_model_fn(metrics=metrics), tmp_path)


def test_a_train_op_that_is_made_in_every_mode_does_not_run(tmp_path):
    backward = []

    @tf.custom_gradient
    def watched(x):
        def gradient(upstream):
            note = tf.numpy_function(lambda: backward.append(1), [], [])
            with tf.control_dependencies([note]):
                return tf.identity(upstream)

        return tf.identity(x), gradient

    def make(make_train_op):
        def model_fn(features, labels, mode):
            predicted = watched(output_layer(hidden_layer(features["x"])))
            loss = tf.reduce_mean(tf.square(predicted - labels))
            ops = {"mean": v1.metrics.mean(predicted)}
            train_op = make_train_op(loss)
            for window in get_windows():
                loss = window.mean_loss
            return spec_of(mode, loss, train_op, eval_metric_ops=ops)

        return model_fn

    ours = _evaluate_auto(make(by_train_op("adam")), tmp_path / "ours", begun_with=4)
    _assert_same(ours, _evaluate(make(plain("adam")), tmp_path / "plain"))
    assert not backward


@pytest.mark.parametrize("version", [1, 2])
def test_canned_classifiers_are_evaluated_and_predict(version, tmp_path):
    numeric, _, embedded = word_columns()
    home = v1.estimator if version == 1 else tf.estimator
    config = tf.estimator.RunConfig(str(tmp_path), tf_random_seed=3)
    canned = home.DNNClassifier([4], [numeric, embedded], config=config)
    reduction = "sum" if version == 1 else "mean"
    canned.train(words_input_fn)
    _keep_number(tmp_path, 4, "eval", "predict")
    model_fn = microbatch_model_fn(canned.model_fn, "auto", reduction=reduction)
    ours = tf.estimator.Estimator(model_fn, config=config)
    _assert_same(ours.evaluate(words_input_fn), canned.evaluate(words_input_fn))
    predictions = [
        list(net.predict(words_input_fn, predict_keys=["class_ids", "probabilities"]))
        for net in (ours, canned)
    ]
    for one, other in zip(*predictions, strict=True):
        assert one["class_ids"] == other["class_ids"]
        np.testing.assert_allclose(
            one["probabilities"], other["probabilities"], rtol=1e-6
        )


def test_two_replicas_evaluate_as_the_plain_estimator_does(tmp_path):
    config = tf.estimator.RunConfig(
        eval_distribute=two_replicas(), session_config=TWO_CPUS
    )
    calls = iter(range(1000))
    memory = Memory(lambda rows: next(calls) != 2)  # one of two replicas, in batch 2

    def make(memory):
        def model_fn(features, labels, mode):
            predicted = output_layer(hidden_layer(memory.allocate(features["x"])))
            is_high, is_found = labels[:, 0] > 0, predicted[:, 0] > 0
            accuracy = tf.keras.metrics.BinaryAccuracy()
            accuracy.update_state(is_high, is_found)
            ops = {"keras": accuracy, "v1": v1.metrics.accuracy(is_high, is_found)}
            ops["mean"] = v1.metrics.mean(predicted)
            loss = tf.reduce_sum(tf.square(predicted - labels))
            return spec_of(mode, loss, None, eval_metric_ops=ops)

        return model_fn

    def input_fn():
        """Returns batches of 16 (4 times), 7 and no examples, for replicas in turn."""
        empty = {"x": tf.zeros([0, 5])}, tf.zeros([0, 1])
        return input_fn_of(4 * 16 + 7, 16)().concatenate(
            tf.data.Dataset.from_tensors(empty)
        )

    more = {"config": config, "reduction": "sum"}
    ours = _evaluate_auto(make(memory), tmp_path / "ours", input_fn, **more)
    theirs = _evaluate(make(_PLENTY), tmp_path / "plain", input_fn, config)
    _assert_same(ours, theirs)
    tried = [size for size in memory.sizes if size < 16]
    assert sorted(tried) == [0, 3, 4, 8, 8, 8, 8]


def test_hooks_get_the_batch(tmp_path):
    def metrics(labels, predicted):
        v1.add_to_collection("size", tf.shape(predicted)[0])

    sizes = Fetch("size")
    _keep_number(tmp_path, 4)
    model_fn = microbatch_model_fn(_model_fn(metrics=metrics), "auto")
    _evaluate(model_fn, tmp_path, hooks=[sizes])
    assert sizes.values == [16] * 5 + [7]


def test_a_model_fn_that_does_not_take_the_mode_is_cut_too(tmp_path):
    memory = Memory(lambda rows: rows <= 8)

    def model_fn(features):
        predicted = output_layer(embedding_layer(memory.allocate(features)))
        loss = tf.reduce_mean(predicted)
        mode = tf.estimator.ModeKeys.TRAIN
        return spec_of(mode, loss, by_train_op("sgd")(loss))

    def input_fn():
        return input_fn_of(16, 16)().map(lambda features, labels: features["x"])

    model_fn = microbatch_model_fn(model_fn, "auto")
    tf.estimator.Estimator(model_fn, str(tmp_path)).train(input_fn)
    assert memory.sizes == [16, 8, 8]


@pytest.mark.parametrize("name", ["chosen_words", "ragged_rows"])
def test_a_loss_of_lists_is_evaluated(name, tmp_path):
    loss = losses.LOSSES[name]
    results, model_fn = [], losses.model_fn_of(loss)
    model_fns = {"plain": model_fn, "ours": microbatch_model_fn(model_fn)}
    for folder, model_fn in model_fns.items():
        (tmp_path / folder).mkdir()
        choice = tmp_path / folder / "micro_batches-eval.json"
        choice.write_text('{"micro_batches": 4}')
        config = tf.estimator.RunConfig(tf_random_seed=1)
        estimator = tf.estimator.Estimator(model_fn, str(tmp_path / folder), config)
        results.append(estimator.evaluate(losses.input_fn_of(loss), 3)["loss"])
    np.testing.assert_allclose(*results, 1e-6)


def _looking_up(features, labels, mode):
    del labels
    hidden = hidden_layer(features["x"])
    number, width = tf.shape(hidden)[0], tf.shape(hidden)[1]
    places = tf.range(number) * width + features["at"]
    chosen = tf.gather(tf.reshape(hidden, [-1]), places)
    return tf.estimator.EstimatorSpec(mode, loss=tf.reduce_mean(tf.tanh(chosen) ** 2))


@pytest.mark.parametrize(
    ("number", "at", "example"), [(4, 3, 4), (1, 9, 4), (4, 9, 4), (4, 9, 5)]
)
def test_a_fact_that_an_evaluation_relies_on_is_checked(number, at, example, tmp_path):
    x, _ = make_data(12)
    at = np.where(np.arange(12) == example, at, 2).astype(np.int32)  # of 8 values

    def input_fn():
        return tf.data.Dataset.from_tensors(({"x": x, "at": at}, x))

    def evaluate(model_fn, name):
        estimator = tf.estimator.Estimator(model_fn, str(tmp_path / name))
        return estimator.evaluate(input_fn)["loss"]

    plain = evaluate(_looking_up, "plain")
    (tmp_path / "ours").mkdir()
    choice = f'{{"micro_batches": {number}}}'
    (tmp_path / "ours" / "micro_batches-eval.json").write_text(choice)
    model_fn = microbatch_model_fn(_looking_up, "auto")
    if number == 1 or at.max() < 8:
        np.testing.assert_allclose(evaluate(model_fn, "ours"), plain, 1e-6)
    else:
        with pytest.raises(ValueError, match="may only look up values of its own"):
            evaluate(model_fn, "ours")


def test_a_lookup_that_fails_unsplit_fails_as_in_a_plain_run(tmp_path):
    x, _ = make_data(12)
    features = {"x": x, "at": np.full(12, 1000, np.int32)}
    estimator = tf.estimator.Estimator(microbatch_model_fn(_looking_up), str(tmp_path))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"indices.* not in \["):
        estimator.evaluate(lambda: tf.data.Dataset.from_tensors((features, x)))


def test_memory_that_runs_out_at_a_lookup_is_no_wrong_fact(monkeypatch, tmp_path):
    memory = Memory(lambda rows: rows <= 3)

    def fail(guard):  # as the lookup itself would
        operations = guard.places.graph.get_operations()
        return [operation for operation in operations if operation.type == "PyFunc"]

    def model_fn(features, labels, mode):
        x = memory.allocate(features["x"])
        return _looking_up({"x": x, "at": features["at"]}, labels, mode)

    monkeypatch.setattr(guards.OwnRows, "lookups", property(fail))
    x, _ = make_data(12)
    features = {"x": x, "at": np.zeros(12, np.int32)}
    estimator = tf.estimator.Estimator(microbatch_model_fn(model_fn), str(tmp_path))
    estimator.evaluate(lambda: tf.data.Dataset.from_tensors((features, x)))
    assert memory.sizes[:4] == [12, 6, 3, 3]
