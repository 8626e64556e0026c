"""A model_fn whose gradients read variables that its earlier updates have changed."""

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import microbatch_model_fn, whole_batch_loss
from tests.helpers.models import model_fns
from tests.helpers.models.losses import input_fn_of, variable
from tests.helpers.models.microbatch_runs import train
from tests.helpers.models.replicas import TWO_CPUS, two_replicas
from tests.helpers.models.summaries import read_scalars
from tests.helpers.oracles import exactness
from tests.helpers.tables import rows

v1 = tf.compat.v1
_SCRIPT, _ = model_fns.EXACT["adversaries_in_order"]
_CRITICS, _ = model_fns.EXACT["several_critics"]


@pytest.mark.once
@pytest.mark.parametrize("script", rows([_SCRIPT, _CRITICS], {_CRITICS}))
def test_a_batch_that_runs_out_of_memory_in_any_pass_is_rolled_back(script, memory):
    model_fn, input_fn = model_fns.model_fn_of(script), input_fn_of(script)
    cut_model_fn, whole = microbatch_model_fn(model_fn, "auto"), None
    for place in itertools.count(1):
        memory.after, memory.done = {0, place}, 0  # of two micro-batches and more
        cut = exactness.train(cut_model_fn, input_fn, 1, whole and whole.start)
        whole = whole or exactness.train(model_fn, input_fn, 1, cut.start)
        exactness._assert_equal(cut, whole, 1e-12, 1, ())
        if memory.done <= place:
            assert place > 4
            break


_VALUES = "values"  # a collection
# Numbers of its reads of variables beside an update, which race it in a plain run.
_RACING = {3, 4, 6}


def _adversaries(features, labels, mode, *, has_summaries=True):
    """As an Estimator trains them, with summaries and a fetch of each kind."""
    del labels
    x, z = features["x"], features["z"]
    judge, maker = variable("judge", 4, 1), variable("maker", 3, 4)
    imitation = tf.matmul(z, maker)
    fake = tf.matmul(imitation, judge)
    judge_loss = tf.math.log(tf.reduce_sum(tf.exp(fake - tf.matmul(x, judge))))
    step = v1.train.get_global_step()
    optimizer = v1.train.AdamOptimizer(0.1)
    gradients = optimizer.compute_gradients(judge_loss, [judge])
    old = judge.read_value()
    with tf.control_dependencies([old]):
        judge_op = optimizer.apply_gradients(gradients, step)
    with tf.control_dependencies([judge_op]):
        trained = judge.read_value()
        after = tf.matmul(imitation, trained)
        loss = tf.math.reduce_variance(after) - tf.reduce_mean(after)
        rate = 0.1 / tf.cast(step.read_value(), tf.float64)
        optimizer = v1.train.MomentumOptimizer(rate, 0.9, name="Maker")
        train_op = optimizer.minimize(loss, None, [maker])
        moved = tf.norm(judge.read_value())
        change = tf.norm(judge.read_value() - old)
    values = {"judge_loss": judge_loss, "loss": loss, "both": loss + judge_loss}
    values |= {"of_judge": tf.norm(judge), "fake": tf.norm(fake)}
    values |= {"after": tf.norm(after), "step": step}
    values |= {"of_gradient": tf.norm(gradients[0][0]), "moved": moved}
    values |= {"change": change, "rate": rate, "trained": tf.reduce_sum(trained)}
    values["of_both_times"] = judge_loss / tf.norm(trained)
    for name, value in values.items():
        v1.add_to_collection(_VALUES, value)
        if has_summaries:
            v1.summary.scalar(name, value)
    v1.add_to_collection(_VALUES, trained)
    if has_summaries:
        v1.summary.histogram("rows", fake)
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


class _Fetch(v1.train.SessionRunHook):
    """Records values of the model_fn, in every run of the train op.

    Args:
        is_one: Whether each run fetches one value, in turn.
    """

    def __init__(self, is_one=False):
        self.is_one, self.values = is_one, []

    def before_run(self, run_context):
        values = v1.get_collection(_VALUES)
        if self.is_one:
            values = values[len(self.values) % len(values)]
        return v1.train.SessionRunArgs(values)

    def after_run(self, run_context, run_values):
        self.values.append(run_values.results)


def _input_fn(batches=2):
    random = np.random.default_rng(0)
    number = 23 * batches
    features = {
        name: random.normal(size=(number, n)) for name, n in (("x", 4), ("z", 3))
    }
    return tf.data.Dataset.from_tensor_slices((features, np.zeros(number))).batch(23)


@pytest.mark.parametrize("number", [1, 3, "auto"])
def test_hooks_and_summaries_see_the_values_of_the_whole_batch(number, tmp_path):
    fetches, results = [_Fetch(), _Fetch()], []
    model_fns_of_runs = [_adversaries, microbatch_model_fn(_adversaries, number)]
    for i, model_fn in enumerate(model_fns_of_runs):
        results.append(train(model_fn, tmp_path / str(i), _input_fn, [fetches[i]]))
    for name, value in results[0].items():
        np.testing.assert_allclose(results[1][name], value, 1e-12, 1e-12)
    for values, plain in zip(*(fetch.values for fetch in fetches[::-1]), strict=True):
        for i, value in enumerate(values):
            if i not in _RACING:
                np.testing.assert_allclose(value, plain[i], 1e-12, 1e-12)
    first, second = fetches[1].values
    np.testing.assert_allclose(first[6], 0)
    np.testing.assert_allclose(second[6], 1)
    (_, _, both), *_ = read_scalars(tmp_path / "1", "both")
    np.testing.assert_allclose(both, first[2], 1e-6)


def test_a_value_is_the_same_if_a_hook_fetches_it_alone(tmp_path):
    fetches, results = [_Fetch(is_one=True), _Fetch(is_one=True)], []
    model_fn = functools.partial(_adversaries, has_summaries=False)
    for i, make in enumerate((model_fn, microbatch_model_fn(model_fn, 3))):
        input_fn = functools.partial(_input_fn, batches=14)
        results.append(train(make, tmp_path / str(i), input_fn, [fetches[i]], None))
    for name, value in results[0].items():
        np.testing.assert_allclose(results[1][name], value, 1e-10, 1e-10)
    pairs = zip(*(fetch.values for fetch in fetches), strict=True)
    for i, (plain, value) in enumerate(pairs):
        if i not in _RACING:
            np.testing.assert_allclose(value, plain, 1e-10, 1e-10)


class _Norm(v1.train.SessionRunHook):
    """Records a variable's norm after its update, by operations of its own."""

    def begin(self):
        with tf.control_dependencies(v1.get_collection(_VALUES)):
            self._norm = tf.norm(v1.trainable_variables()[0].read_value())
        self.norms = []

    def before_run(self, run_context):
        return v1.train.SessionRunArgs(self._norm)

    def after_run(self, run_context, run_values):
        self.norms.append(run_values.results)


@pytest.mark.parametrize(
    "options", [{}, {"has_step": False}, {"is_loss": True}], ids=str
)
def test_a_hook_reads_a_variable_after_an_update(options, tmp_path):
    hooks = [_Norm(), _Norm()]
    model_fn = functools.partial(_fetched_update, **options)
    for i, make in enumerate((model_fn, microbatch_model_fn(model_fn, 2))):
        train(make, tmp_path / str(i), _input_fn, [hooks[i]])
    np.testing.assert_allclose(hooks[1].norms, hooks[0].norms, 1e-12)


def _sparse(features, labels, mode, *, is_dense):
    """A summary sees a clipped gradient of an update before the last one."""
    del labels
    x, table = features["x"], variable("table", 5, 2)
    rows = tf.gather(table, tf.cast(tf.abs(x), tf.int32) % 5)
    kernel = variable("kernel", 2)
    gradients = tf.gradients(tf.reduce_mean((rows * kernel) ** 2), [table, kernel])
    gradients = [tf.convert_to_tensor(gradients[0]), 2 * gradients[1]]
    v1.summary.scalar("norm", tf.norm(gradients[is_dense]))
    optimizer = v1.train.GradientDescentOptimizer(0.1)
    update = optimizer.apply_gradients(zip(gradients, [table, kernel], strict=True))
    count = v1.get_variable("count", [], tf.int64, v1.zeros_initializer(), None, False)
    with tf.control_dependencies([update, count.assign_add(1)]):
        loss = tf.reduce_mean(tf.linalg.matvec(_hidden(x), variable("b", 2)))
        loss += 0 * tf.nn.l2_loss(table.read_value())
        train_op = _descend(loss, variable("b", 2))
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def test_a_summary_of_a_sparse_gradient_that_is_gone_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must not fetch a sparse gradient"):
        model_fn = functools.partial(_sparse, is_dense=False)
        train(microbatch_model_fn(model_fn, 2), tmp_path, _input_fn)


def test_a_summary_of_a_dense_gradient_beside_a_sparse_one_is_written(tmp_path):
    model_fn = functools.partial(_sparse, is_dense=True)
    norms = []
    for i, make in enumerate((model_fn, microbatch_model_fn(model_fn, 2))):
        train(make, tmp_path / str(i), _input_fn)
        norms.append([norm for *_, norm in read_scalars(tmp_path / str(i), "norm")])
    np.testing.assert_allclose(*norms, 1e-6)
    assert min(norms[0]) > 0


def _fetched_update(features, labels, mode, *, has_step=True, is_loss=False):
    """Collects an update before the last one, or the loss that comes after it."""
    del labels
    first = tf.reduce_mean(_hidden(features["x"]) ** 2)
    update = v1.train.GradientDescentOptimizer(0.1).minimize(
        first, v1.train.get_global_step() if has_step else None, [variable("a", 4, 2)]
    )
    with tf.control_dependencies([update]):
        loss = tf.reduce_mean(
            tf.linalg.matvec(_hidden(features["x"]), variable("b", 2))
        )
        v1.add_to_collection(_VALUES, loss if is_loss else update)
        train_op = _descend(loss, variable("b", 2))
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def test_a_summary_of_a_variable_is_from_before_all_updates(tmp_path):
    def model_fn(features, labels, mode):
        spec = _fetched_update(features, labels, mode)
        v1.summary.scalar("norm", tf.norm(variable("a", 4, 2)))  # beside the loss
        return spec

    train(microbatch_model_fn(model_fn, 2), tmp_path, _input_fn)
    (_, _, norm), *_ = read_scalars(tmp_path, "norm")
    start = tf.train.load_variable(str(tmp_path / "model.ckpt-0"), "a")
    np.testing.assert_allclose(norm, np.linalg.norm(start), 1e-6)


class _ReadsBehind(v1.train.SessionRunHook):
    """Records a variable that it reads behind an update."""

    def __init__(self):
        self.read, self.values = None, []

    def begin(self):
        if self.read is None:
            with tf.control_dependencies(v1.get_collection(_VALUES)):
                self.read = v1.trainable_variables()[0].read_value()

    def before_run(self, run_context):
        return v1.train.SessionRunArgs(self.read)

    def after_run(self, run_context, run_values):
        self.values.append(run_values.results)


def test_a_hook_reads_behind_an_update_in_each_session_of_a_graph():
    with tf.Graph().as_default():
        v1.train.create_global_step()
        batch = v1.data.make_one_shot_iterator(_input_fn(4)).get_next()
        mode = tf.estimator.ModeKeys.TRAIN
        spec = microbatch_model_fn(_fetched_update, 2)(*batch, mode)
        hook = _ReadsBehind()
        for _ in range(2):
            hooks = [hook, *spec.training_hooks]
            with v1.train.SingularMonitoredSession(hooks=hooks) as session:
                session.run(spec.train_op)
                updated = session.raw_session().run(v1.trainable_variables()[0])
            np.testing.assert_array_equal(hook.values[-1], updated)


def test_a_hook_that_would_make_an_update_again_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must not make a change again"):
        train(microbatch_model_fn(_fetched_update, 2), tmp_path, _input_fn, [_Fetch()])


def _between(features, labels, mode):
    """A value is computed between two updates before the last one."""
    del labels
    x, kernel, done = features["x"], variable("a", 4, 2), []
    for _ in range(2):
        with tf.control_dependencies(done):
            done = [_descend(tf.reduce_mean(tf.matmul(x, kernel) ** 2), kernel)]
        with tf.control_dependencies(done):
            v1.add_to_collection(_VALUES, tf.norm(kernel.read_value()))
    with tf.control_dependencies(done):
        loss = tf.reduce_mean(tf.linalg.matvec(_hidden(x), variable("b", 2)))
        train_op = _descend(loss, variable("b", 2))
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def test_a_value_between_two_earlier_updates_is_refused(tmp_path):
    with pytest.raises(ValueError, match="come after all updates but the last"):
        train(microbatch_model_fn(_between, 2), tmp_path, _input_fn, [_Fetch()])


def _of_noise(features, labels, mode):
    """Both phases read the same random numbers, though the first counts the step."""
    del labels
    x, one, other = features["x"], variable("one", 4), variable("other", 4)
    noisy = tf.random.normal(tf.shape(x), dtype=tf.float64) * x
    step = v1.train.get_global_step()
    first = v1.train.GradientDescentOptimizer(0.1).minimize(
        tf.reduce_mean(tf.linalg.matvec(noisy, one)), step, [one]
    )
    with tf.control_dependencies([first]):
        loss = tf.reduce_mean(tf.linalg.matvec(noisy, other))
        loss += 0 * tf.reduce_mean(tf.linalg.matvec(x, one))
        train_op = v1.train.GradientDescentOptimizer(0.1).minimize(loss, None, [other])
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def test_random_numbers_are_the_same_in_all_phases(tmp_path):
    values = train(microbatch_model_fn(_of_noise, 3), tmp_path, _input_fn)
    start = values["one"] - values["other"]
    begun = train(microbatch_model_fn(_of_noise, 3), tmp_path / "0", _input_fn, (), 1)
    np.testing.assert_allclose(start, begun["one"] - begun["other"], 1e-12)
    assert np.max(np.abs(values["one"] - begun["one"])) > 1e-3


def _descend(loss, *variables):
    return v1.train.GradientDescentOptimizer(0.1).minimize(loss, None, variables)


def _hidden(x):
    return tf.tanh(tf.matmul(x, variable("a", 4, 2)))


def _normalized(x):
    """Averages of batch normalization are moved once for each call."""
    layer = v1.layers.batch_normalization
    before = layer(_hidden(x), training=True, momentum=0.5, name="one")
    moves = v1.get_collection(v1.GraphKeys.UPDATE_OPS)
    with tf.control_dependencies(moves):
        first = tf.reduce_mean((before - 1) ** 2 * tf.nn.sigmoid(_hidden(x)))
    with tf.control_dependencies([_descend(first, variable("a", 4, 2))]):
        after = layer(_hidden(x) * variable("b", 2), training=True, name="two")
        more = [u for u in v1.get_collection(v1.GraphKeys.UPDATE_OPS) if u not in moves]
        loss = tf.reduce_mean(tf.nn.sigmoid(after) * _hidden(x))
        with tf.control_dependencies(more):
            return first + loss, _descend(tf.identity(loss), variable("b", 2))


def _counted(x):
    """The second loss reads a count that the first one waits for."""
    count = v1.get_variable("count", [], tf.float64, v1.ones_initializer(), None, False)
    with tf.control_dependencies([count.assign_add(1.0)]):
        first = tf.reduce_mean(_hidden(x) ** 2)
    with tf.control_dependencies([_descend(first, variable("a", 4, 2))]):
        outputs = tf.linalg.matvec(_hidden(x), variable("b", 2))
        loss = tf.reduce_mean((outputs - count.read_value()) ** 2)
        return first + loss, _descend(loss, variable("b", 2))


def _counted_rate(x):
    """Both optimizers read a count that the batch has moved, as their learning rate."""
    count = v1.get_variable("count", [], tf.float64, v1.ones_initializer(), None, False)
    optimizer = v1.train.GradientDescentOptimizer(0.1 / count.assign_add(1.0))
    first = tf.reduce_mean(_hidden(x) ** 2)
    first_op = optimizer.minimize(first, None, [variable("a", 4, 2)])
    with tf.control_dependencies([first_op]):
        loss = tf.reduce_mean((tf.linalg.matvec(_hidden(x), variable("b", 2)) - 1) ** 2)
        return first + loss, optimizer.minimize(loss, None, [variable("b", 2)])


def _measured(x):
    """Metrics of both losses' results, in a variable that is not trained."""
    largest = v1.get_variable("largest", [], tf.float64, trainable=False)
    before = _hidden(x)
    with tf.control_dependencies(
        [_descend(tf.reduce_mean(before), variable("a", 4, 2))]
    ):
        after = tf.linalg.matvec(_hidden(x), variable("b", 2))
        loss = tf.math.reduce_std(after)
        metric = largest.assign(tf.reduce_max(after) * tf.reduce_max(before))
        return loss, tf.group(_descend(loss, variable("b", 2)), metric)


def _in_a_branch(x):
    """A branch reads the variable that has changed."""
    first = tf.reduce_mean(_hidden(x) ** 2)
    with tf.control_dependencies([_descend(first, variable("a", 4, 2))]):
        is_even = tf.equal(v1.train.get_global_step() % 2, 0)
        outputs = tf.cond(is_even, lambda: _hidden(x), lambda: -_hidden(x))
        loss = tf.reduce_mean((tf.linalg.matvec(outputs, variable("b", 2)) - 1) ** 2)
        return loss, _descend(loss, variable("b", 2))


def _regularized(x):
    """A second loss that needs no batch."""
    first = tf.reduce_mean(_hidden(x) ** 2)
    with tf.control_dependencies([_descend(first, variable("a", 4, 2))]):
        loss = tf.nn.l2_loss(variable("a", 4, 2).read_value())
        return first, _descend(loss, variable("a", 4, 2))


@pytest.mark.parametrize(
    "script",
    [_normalized, _counted, _counted_rate, _measured, _in_a_branch, _regularized],
)
def test_a_loss_after_an_update_sees_all_that_comes_before(script):
    def model_fn(features, labels, mode):
        del labels
        loss, train_op = script(features["x"])
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    exactness.assert_exact(model_fn, _input_fn, (1, 3))


def _spectral(features, labels, mode):
    """A power iteration with each call, whose vector is read by the second loss, too."""
    del labels
    x, vector = features["x"], v1.get_variable("u", [1, 2], tf.float64, trainable=False)

    def judge(x):
        kernel = variable("a", 4, 2)
        left = tf.nn.l2_normalize(tf.matmul(vector, kernel, transpose_b=True))
        right = tf.nn.l2_normalize(tf.matmul(left, kernel))
        norm = tf.matmul(tf.matmul(left, kernel), right, transpose_b=True)
        with tf.control_dependencies([vector.assign(right)]):
            return tf.matmul(x, kernel / norm)

    first = _descend(tf.reduce_mean(judge(x) ** 2), variable("a", 4, 2))
    with tf.control_dependencies([first]):
        loss = tf.reduce_mean(judge(tf.matmul(x, variable("b", 4, 4))) ** 2)
        train_op = _descend(loss, variable("b", 4, 4))
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def test_a_change_between_two_losses_that_the_second_reads_is_refused():
    with pytest.raises(exactness.Refused, match="spectral normalization"):
        exactness.train(microbatch_model_fn(_spectral, 2), _input_fn)


def _of_count(features, labels, mode):
    """The first loss reads a count after the batch has moved it."""
    del labels
    x = features["x"]
    count = v1.get_variable("count", [], tf.float64, v1.ones_initializer(), None, False)
    first = _descend(
        tf.reduce_mean(_hidden(x) ** 2) * count.assign_add(1.0), variable("a", 4, 2)
    )
    with tf.control_dependencies([first]):
        loss = tf.reduce_mean(tf.linalg.matvec(_hidden(x), variable("b", 2)))
        train_op = _descend(loss, variable("b", 2))
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def test_a_loss_of_a_variable_that_has_changed_is_refused():
    with pytest.raises(exactness.Refused, match="every micro-batch would change it"):
        exactness.train(microbatch_model_fn(_of_count, 2), _input_fn)


def test_several_replicas_are_refused(tmp_path):
    config = tf.estimator.RunConfig(
        str(tmp_path), train_distribute=two_replicas(), session_config=TWO_CPUS
    )
    model_fn = microbatch_model_fn(_adversaries, 2)
    with pytest.raises(ValueError, match="On several replicas .* microbatch_step"):
        tf.estimator.Estimator(model_fn, config=config).train(_input_fn)


def test_reference_variables_are_refused():
    v1.disable_resource_variables()
    v1.disable_control_flow_v2()
    try:
        with pytest.raises(exactness.Refused, match="resource variable"):
            exactness.train(
                microbatch_model_fn(model_fns.model_fn_of(_SCRIPT), 2),
                input_fn_of(_SCRIPT),
            )
    finally:
        v1.enable_control_flow_v2()
        v1.enable_resource_variables()


def _compared(features, labels, mode):
    """A loss of all examples that is computed from a variable which has changed."""
    del labels
    x, one = features["x"], variable("one", 4)
    step, optimizer = v1.train.get_global_step(), v1.train.AdamOptimizer()
    first = optimizer.minimize(tf.reduce_mean(tf.linalg.matvec(x, one)), step)
    with tf.control_dependencies([first]):
        loss = whole_batch_loss(tf.linalg.matvec(x, one), tf.math.reduce_std)
        train_op = optimizer.minimize(loss)
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def test_whole_batch_loss_of_a_changed_variable_is_refused(tmp_path):
    with pytest.raises(ValueError, match="variables that the batch has not changed"):
        train(microbatch_model_fn(_compared, 2), tmp_path, _input_fn)
