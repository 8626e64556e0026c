"""Estimators that train in micro-batches have the weights of the batch."""

import functools

import pytest
import tensorflow as tf
from tensorflow.python.util import function_utils

from estimator_accum import AccumulatingOptimizer, get_windows, microbatch_model_fn
from estimator_accum.microbatch.own_optimizer.activations import SHARE
from tests.helpers.models.microbatch_runs import (
    INPUT,
    OPTIMIZERS,
    Fetch,
    by_optimizer,
    by_train_op,
    difference,
    embedding_layer,
    hidden_layer,
    input_fn_of,
    loss_of,
    make_model_fn,
    output_layer,
    plain,
    spec_of,
    train,
    train_in_micro_batches,
    variables_of,
    word_columns,
    words_input_fn,
)

v1 = tf.compat.v1


def test_two_train_ops_share_their_micro_batches(tmp_path):
    def make(make_train_op):
        def model_fn(features, labels, mode):
            # Resource variables: the first update would change a reference variable
            # before the second gradient reads it.
            with v1.variable_scope(v1.get_variable_scope(), use_resource=True):
                loss = loss_of(features, labels)
            first, second = v1.trainable_variables()
            step = v1.train.get_global_step()
            sgd = make_train_op(OPTIMIZERS["sgd"](), loss, [first], None)
            adam = make_train_op(OPTIMIZERS["adam"](), loss, [second], step)
            return spec_of(mode, loss, tf.group(sgd, adam))

        return model_fn

    def theirs(optimizer, loss, variables, step):
        return optimizer.minimize(loss, step, variables)

    def ours(optimizer, loss, variables, step):
        return AccumulatingOptimizer(optimizer, 1).minimize(loss, step, variables)

    expected = train(make(theirs), tmp_path / "plain", input_fn_of(16, 16))
    folder = tmp_path / "ours"
    values = train_in_micro_batches(make(ours), folder, input_fn_of(16, 16), 4)
    assert difference(values, expected) <= 1e-6


def test_checkpoints_are_those_of_the_plain_estimator(tmp_path):
    one = input_fn_of(16, 16)
    adam = make_model_fn(plain("adam"))
    theirs = train(adam, tmp_path / "plain", lambda: one().repeat(3))
    for i in range(3):  # plain, in micro-batches, plain
        if i == 1:
            model_fn = make_model_fn(by_train_op("adam"))
            ours = train_in_micro_batches(model_fn, tmp_path / "mixed", one, 1)
            assert ours.keys() - theirs.keys() == {"update_step"}
            assert ours["update_step"] == 2
        else:
            ours = train(adam, tmp_path / "mixed", one)
    assert difference(ours, theirs) == 0


def test_max_steps_ends_training_between_two_batches(tmp_path):
    estimator = tf.estimator.Estimator(
        microbatch_model_fn(make_model_fn(by_train_op("sgd")), 4), str(tmp_path)
    )
    losses = Fetch(v1.GraphKeys.GLOBAL_STEP)
    estimator.train(INPUT, hooks=[losses], max_steps=3)
    assert len(losses.values) == 3
    assert estimator.get_variable_value("global_step") == 3


def test_evaluation_and_prediction_are_the_model_fns_own(tmp_path):
    model_fn = make_model_fn(by_train_op("sgd"))
    estimator = tf.estimator.Estimator(microbatch_model_fn(model_fn, 4), str(tmp_path))
    plain = tf.estimator.Estimator(model_fn, str(tmp_path))
    estimator.train(INPUT)
    evaluated = estimator.evaluate(INPUT)
    assert evaluated == plain.evaluate(INPUT)
    assert len(list(estimator.predict(INPUT))) == 5 * 16 + 7


def test_a_model_fn_gets_the_arguments_that_it_takes(tmp_path):
    def mean_of(x):
        return tf.reduce_mean(output_layer(hidden_layer(x)))

    def of_features(features):
        loss = mean_of(features)
        return spec_of(tf.estimator.ModeKeys.TRAIN, loss, by_train_op("sgd")(loss))

    def of_params(features, labels, mode, params):
        assert params == {"rate": 0.5}
        loss = mean_of(features["x"] - labels)
        return spec_of(mode, loss, by_train_op("sgd")(loss))

    def without_labels():
        return INPUT().map(lambda features, labels: features["x"])

    wrapped = microbatch_model_fn(of_features, 2)
    tf.estimator.Estimator(wrapped, str(tmp_path / "a")).train(without_labels, steps=1)
    with pytest.raises(ValueError, match="model_fn .* params"):
        tf.estimator.Estimator(wrapped, str(tmp_path / "a"), params={"rate": 0.5})
    with pytest.raises(ValueError, match="model_fn does not take labels"):
        tf.estimator.Estimator(wrapped, str(tmp_path / "a")).train(INPUT)
    wrapped, params = microbatch_model_fn(of_params, 2), {"rate": 0.5}
    estimator = tf.estimator.Estimator(wrapped, str(tmp_path / "b"), params=params)
    estimator.train(INPUT, steps=1)
    assert estimator.get_variable_value("global_step") == 1


def test_canned_estimators_train_in_micro_batches(tmp_path):
    numeric, column, embedded = word_columns()
    config = tf.estimator.RunConfig(tf_random_seed=3)

    def make(wrap, folder):
        return v1.estimator.DNNLinearCombinedClassifier(
            linear_feature_columns=[column],
            linear_optimizer=wrap(OPTIMIZERS["sgd"]),
            dnn_feature_columns=[numeric, embedded],
            dnn_hidden_units=[4],
            dnn_optimizer=wrap(OPTIMIZERS["momentum"]),
            config=config,
            model_dir=str(folder),
        )

    def accumulating(optimizer):
        return lambda: AccumulatingOptimizer(optimizer(), 1, reduction="sum")

    theirs = make(lambda optimizer: optimizer, tmp_path / "plain")
    theirs.train(words_input_fn)
    expected = variables_of(theirs)
    model_fn = make(accumulating, tmp_path / "ours").model_fn
    model_fn = microbatch_model_fn(model_fn, 4, reduction="sum")
    ours = tf.estimator.Estimator(model_fn, str(tmp_path / "ours"), config)
    ours.train(words_input_fn)
    values = variables_of(ours)
    assert all("update_step" in name for name in values.keys() - expected.keys())
    assert difference(values, expected) <= 1e-6


_BATCHES = 3  # the batches of words_input_fn


def _deep(optimizer):
    numeric, _, embedded = word_columns()
    return lambda folder, config: tf.estimator.DNNClassifier(
        [4], [numeric, embedded], optimizer=optimizer, model_dir=folder, config=config
    )


def _wide_and_deep(folder, config):
    numeric, words, _ = word_columns()
    return tf.estimator.DNNLinearCombinedRegressor(
        linear_feature_columns=[words],
        linear_optimizer=lambda: tf.keras.optimizers.legacy.SGD(0.01),
        dnn_feature_columns=[numeric],
        dnn_hidden_units=[4],
        dnn_optimizer=lambda: tf.keras.optimizers.legacy.Adam(0.01),
        loss_reduction=tf.keras.losses.Reduction.SUM,
        model_dir=folder,
        config=config,
    )


_SGD = tf.keras.optimizers.legacy.SGD
_ESTIMATORS = {
    "adam": (_deep(lambda: tf.keras.optimizers.legacy.Adam(0.01)), "mean"),
    "default": (_deep("Adagrad"), "mean"),
    "clipped": (_deep(lambda: _SGD(0.5, global_clipnorm=0.1)), "mean"),
    "wide_and_deep": (_wide_and_deep, "sum"),
}


@pytest.mark.parametrize("name", _ESTIMATORS)
def test_canned_estimators_of_tensorflow_2_train_in_micro_batches(
    name, tmp_path, caplog
):
    caplog.set_level("DEBUG", "tensorflow.estimator_accum")
    make, reduction = _ESTIMATORS[name]
    config = tf.estimator.RunConfig(tf_random_seed=3)
    plain = make(str(tmp_path / "plain"), config)
    # Stops before the end of the data, where TensorFlow's Adam decays an embedding's
    # slots once more.
    plain.train(words_input_fn, max_steps=_BATCHES)
    expected = variables_of(plain)
    # One micro-batch is exact, except for the order in which an embedding's rows sum.
    count, tolerance = (1, 1e-7) if name == "default" else (4, 1e-6)
    folder = str(tmp_path / "ours")
    model_fn = make(folder, config).model_fn
    model_fn = microbatch_model_fn(model_fn, count, reduction=reduction)
    ours = tf.estimator.Estimator(model_fn, folder, config)
    ours.train(words_input_fn, max_steps=_BATCHES)
    values = variables_of(ours)
    added = values.keys() - expected.keys()
    assert all("update_step" in name for name in added)
    assert values["global_step"] == _BATCHES
    assert difference(values, expected) <= tolerance
    shares = [record.args[0] for record in caplog.records if record.msg == SHARE]
    assert shares and max(shares) < 5
    if name == "default":  # ours evaluates like the plain one
        assert ours.evaluate(words_input_fn)["global_step"] == _BATCHES


def test_accumulators_are_in_no_collection(tmp_path):
    class Collections(v1.train.SessionRunHook):
        def begin(self):
            (window,) = get_windows()
            self.state = [variable.op.name for variable in window.state]
            variables = v1.global_variables() + v1.local_variables()
            self.found = {variable.op.name for variable in variables}

    seen = Collections()
    model_fn = make_model_fn(by_train_op("sgd"))
    train_in_micro_batches(model_fn, tmp_path, INPUT, 4, hooks=[seen])
    assert seen.state == ["update_step"]
    assert seen.found == {"hidden", "output", "update_step", "global_step"}


@pytest.mark.parametrize(
    ("error", "arguments", "message"),
    [
        (ValueError, {"micro_batches": 0}, "`micro_batches` must be .* Received: 0"),
        (TypeError, {"micro_batches": 2.0}, "or 'auto'. Received: 2.0. Use 1 to"),
        (TypeError, {"micro_batches": "4"}, "or 'auto'. Received: '4'"),
        (TypeError, {"micro_batches": True}, "`micro_batches` .* Received: True"),
        (TypeError, {"micro_batches": None}, "`micro_batches` .* Received: None"),
        (TypeError, {"grow_after": "auto"}, "or None. Received: 'auto'. Use None"),
        (
            ValueError,
            {"grow_after": 0},
            "`grow_after` must be .* >= 1. Received: 0. Use",
        ),
        (ValueError, {"reduction": "max"}, "`reduction` must be .* Received: 'max'"),
    ],
)
def test_wrong_arguments_are_named(error, arguments, message):
    with pytest.raises(error, match=message):
        microbatch_model_fn(make_model_fn(by_train_op("sgd")), **arguments)
    for wrong in (5, tf.estimator.DNNClassifier):
        with pytest.raises(
            TypeError, match=f"`model_fn` must .* Received: {wrong}. Pa"
        ):
            microbatch_model_fn(wrong)


# 5 batches, the last of which is short.
_INPUT = input_fn_of(examples=4 * 64 + 37, batch_size=64)


@pytest.mark.usefixtures("graph_optimizer")
@pytest.mark.parametrize(
    ("make_train_op", "optimizer"), [(by_train_op, "adam"), (by_optimizer, "momentum")]
)
def test_any_number_of_micro_batches_gives_the_batchs_weights_and_one_to_the_bit(
    make_train_op, optimizer, tmp_path
):
    theirs = train(make_model_fn(plain(optimizer)), tmp_path / "plain", _INPUT)
    model_fn = make_model_fn(make_train_op(optimizer))
    several = [(3, 5e-7), (64, 5e-7)] if optimizer == "momentum" else []
    for count, tolerance in [(1, 0), ("auto", 0), *several]:
        ours = train_in_micro_batches(model_fn, tmp_path / str(count), _INPUT, count)
        assert theirs["global_step"] == 5
        assert ours["update_step"] == ours["global_step"] == 5
        assert difference(ours, theirs) <= tolerance


@pytest.mark.usefixtures("graph_optimizer")
@pytest.mark.parametrize(
    ("optimizer", "tolerance"),
    [
        ("adam", 0),
        # The plain optimizer adds a row's gradients to the row one by one.
        ("sgd", 5e-6),
    ],
)
def test_sparse_gradients_are_the_batchs(optimizer, tolerance, tmp_path):
    # Stops before the end of the data, where plain Adam decays its slots once more.
    options = {"input_fn": _INPUT, "max_steps": 4}
    model_fn = make_model_fn(plain(optimizer), embedding_layer)
    theirs = train(model_fn, tmp_path / "plain", **options)
    model_fn = make_model_fn(by_train_op(optimizer), embedding_layer)
    for count in (1, 8):
        folder = tmp_path / str(count)
        ours = train_in_micro_batches(model_fn, folder, micro_batches=count, **options)
        assert difference(ours, theirs) <= max(tolerance, 1e-6 * (count > 1))


def _with_all(features, labels, mode, params=None, config=None):
    return {"params": params, "config": config}


class _Model:
    def method(self, features, labels, mode, params):
        return {"params": params}

    def __call__(self, features, labels, mode, config, params="own"):
        return {"params": params, "config": config}


def _bound(function):
    @functools.wraps(function)
    def inner(features, labels, mode, **others):
        return function(features, labels, mode, **{"params": "own", **others})

    return inner


_FORMS = {
    "function": _with_all,
    "bound params": functools.partial(_with_all, params="own"),
    "bound config": functools.partial(_with_all, config="own"),
    "method": _Model().method,
    "object": _Model(),
    "bound object": functools.partial(_Model(), config="own"),
    "keyword only": lambda features, labels, mode, *, params="own": {"params": params},
    "decorated": _bound(_with_all),
    "keywords": lambda features, labels, mode, **others: others,
}


@pytest.mark.once
@pytest.mark.parametrize("name", _FORMS)
def test_a_model_fn_gets_the_arguments_that_its_estimator_passes(name):
    values = {"params": "theirs", "config": "theirs"}
    names = function_utils.fn_args(_FORMS[name])
    taken = {key: value for key, value in values.items() if key in names}
    expected = _FORMS[name](
        features=1, labels=2, mode=tf.estimator.ModeKeys.EVAL, **taken
    )
    wrapped = microbatch_model_fn(_FORMS[name], 2)
    names = function_utils.fn_args(wrapped)
    taken = {key: value for key, value in values.items() if key in names}
    assert wrapped(1, 2, tf.estimator.ModeKeys.EVAL, **taken) == expected
