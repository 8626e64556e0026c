"""Losses over the whole batch: the update is that of the batch at once."""

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import (
    AccumulatingOptimizer,
    batch_mean,
    make_accumulating_train_op,
    micro_batch_seed,
    microbatch_model_fn,
    recompute,
    whole_batch_loss,
)
from tests.helpers.models.interception import AS_IT_IS
from tests.helpers.models.microbatch_runs import spec_of
from tests.helpers.models.replicas import TWO_CPUS, two_replicas

pytestmark = pytest.mark.usefixtures("graph_optimizer")
v1 = tf.compat.v1
_TRAIN = tf.estimator.ModeKeys.TRAIN
_SIZES = (12, 12, 5)  # examples of the batches
_WIDTH = 5


class _Run:
    """Trains by a model_fn, without an Estimator; None is the batch at once.

    Attributes:
        losses: The reported losses.
        values: The variables in the end.
        fetched: For each update, the tensor of the collection "fetched".
    """

    def __init__(
        self, model_fn, micro_batches=None, sizes=_SIZES, config=AS_IT_IS, **options
    ):
        if micro_batches is not None:
            model_fn = microbatch_model_fn(model_fn, micro_batches, **options)
        self.losses, self.fetched = [], []
        with tf.Graph().as_default():
            v1.set_random_seed(7)
            v1.train.get_or_create_global_step()
            spec = _call(model_fn, *_next_batch(sizes))
            fetched = v1.get_collection("fetched")
            hooks = spec.training_hooks
            with v1.train.SingularMonitoredSession(hooks, config=config) as session:
                while not session.should_stop():
                    results = session.run([spec.train_op, spec.loss, *fetched])
                    self.losses.append(results[1])
                    self.fetched += results[2:]
                    variables = v1.trainable_variables() + v1.global_variables("norm")
                    values = session.raw_session().run(variables)
            names = [variable.op.name for variable in variables]
            self.values = dict(zip(names, values, strict=True))


def _call(model_fn, features, labels):
    return model_fn(features=features, labels=labels, mode=_TRAIN)


def _next_batch(sizes):
    random = np.random.default_rng(0)
    total = sum(sizes)
    x = random.normal(size=[total, 2, _WIDTH]).astype(np.float32)

    def batches():
        end = 0
        for size in sizes:
            begin, end = end, end + size
            yield (
                {"query": x[begin:end, 0], "document": x[begin:end, 1]},
                labels[begin:end],
            )

    labels = np.arange(total)
    spec = tf.TensorSpec([None, _WIDTH])
    signature = {"query": spec, "document": spec}, tf.TensorSpec([None], tf.int64)
    dataset = tf.data.Dataset.from_generator(batches, output_signature=signature)
    return v1.data.make_one_shot_iterator(dataset).get_next()


def _tower(x, name):
    start = np.random.default_rng(len(name)).normal(size=[_WIDTH, 4])
    kernel = v1.get_variable(name, initializer=start.astype(np.float32))
    return tf.tanh(tf.matmul(x, kernel))


def _towers(features):
    return _tower(features["query"], "q"), _tower(features["document"], "documents")


def _info_nce(outputs, scale=4.0):
    query, document = (tf.math.l2_normalize(output, 1) for output in outputs[:2])
    logits = scale * tf.matmul(query, document, transpose_b=True)
    ids = tf.range(tf.shape(query)[0])
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=ids, logits=logits)
    return tf.reduce_mean(losses)


def _by_train_op(loss, **options):
    adam = v1.train.AdamOptimizer(0.05)
    return make_accumulating_train_op(loss, adam, 1, clip_norm=0.5, **options)


def _by_optimizer(loss):
    adam = AccumulatingOptimizer(v1.train.AdamOptimizer(0.05), 1, clip_norm=0.5)
    return adam.minimize(loss, v1.train.get_global_step())


def _model(loss_fn=_info_nce, outputs=None, train_op=_by_train_op, **options):
    """Returns a model_fn; `outputs(features, labels)` are the towers by default."""

    def model_fn(features, labels, mode):
        towers = _towers(features)
        tensors = towers if outputs is None else outputs(features, labels, towers)
        loss = whole_batch_loss(tensors, loss_fn, **options)
        return spec_of(mode, loss, train_op(loss))

    return model_fn


def _assert_same(ours: _Run, theirs: _Run, tolerance=1e-6):
    np.testing.assert_allclose(ours.losses, theirs.losses, tolerance, tolerance)
    assert ours.values.keys() == theirs.values.keys()
    for name, value in theirs.values.items():
        np.testing.assert_allclose(ours.values[name], value, tolerance, tolerance, name)


def _seen(tensor, arrays: list):
    """Returns `tensor`, whose values are added to `found` when they are computed."""

    def see(values):
        arrays.append(np.copy(values))
        return np.float32(1)

    # A factor, so that the gradient needs it too; it has no state.
    one = tf.numpy_function(see, [tensor], tf.float32, stateful=False)
    return tensor * tf.cast(tf.reshape(one, []), tensor.dtype)


@pytest.fixture(scope="module")
def at_once():
    return _Run(_model())


@pytest.mark.parametrize(
    ("train_op", "micro_batches", "tolerance"),
    [(_by_train_op, 1, 0), (_by_train_op, 5, 1e-6), (_by_optimizer, 12, 1e-6)],
)
def test_any_number_of_micro_batches_gives_the_weights_of_the_batch_at_once(
    train_op, micro_batches, tolerance, at_once
):
    ours = _Run(_model(train_op=train_op), micro_batches)
    _assert_same(ours, at_once, tolerance)


def test_loss_fn_runs_once_a_batch_and_a_whole_batch_runs_forward_once():
    for micro_batches, forwards in ((1, 3), (4, 2 * (4 + 4 + 3))):
        losses, sizes = [], []
        model_fn = _model(
            lambda outputs, losses=losses: _seen(_info_nce(outputs), losses),
            lambda features, labels, towers, sizes=sizes: (
                _seen(towers[0], sizes),
                towers[1],
            ),
        )
        run = _Run(model_fn, micro_batches)
        np.testing.assert_allclose(losses, run.losses, rtol=1e-6)
        assert len(sizes) == forwards


@pytest.mark.once
def test_variables_in_loss_fn_and_a_regularizer_get_their_gradients():
    def model_fn(features, labels, mode):
        scale = v1.get_variable("scale", initializer=1.0)
        root = v1.get_variable("root", initializer=1.5)
        squared = tf.square(root)  # of no micro-batch
        v1.get_variable("unused", initializer=1.0)
        queue = v1.get_variable("queue", initializer=[[2.0] * 4] * 3, trainable=False)

        def loss_fn(outputs):
            return _info_nce(outputs, scale * squared + root) + tf.reduce_mean(
                tf.matmul(outputs[0], queue, transpose_b=True)
            )

        loss = whole_batch_loss(_towers(features), loss_fn)
        loss = 0.5 * loss + 0.1 * tf.add_n(map(tf.nn.l2_loss, v1.trainable_variables()))
        return spec_of(mode, loss, _by_train_op(loss))

    theirs = _Run(model_fn)
    assert abs(theirs.values["scale"] - 1) > 0.05 < abs(theirs.values["root"] - 1.5)
    for micro_batches in (1, 3):
        _assert_same(_Run(model_fn, micro_batches), theirs)


def _sum_loss(outputs):
    return _info_nce(outputs) * tf.cast(tf.shape(outputs[0])[0], tf.float32)


@pytest.mark.once
def test_a_loss_that_sums_over_examples_is_shared_out():
    seen, share = [], []

    def model_fn(features, labels, mode):
        loss = whole_batch_loss(_towers(features), _sum_loss)
        scale = v1.get_variable("scale", initializer=1.0)
        loss += whole_batch_loss(
            _towers_again(features), lambda o: scale * _sum_loss(o)
        )
        share.append(loss)
        loss = _seen(loss, seen)
        return spec_of(mode, loss, _by_train_op(loss, reduction="sum"))

    theirs = _Run(model_fn)
    seen.clear()
    ours = _Run(model_fn, 4, reduction="sum")
    _assert_same(ours, theirs, 1e-5)
    sizes = [3, 3, 3, 3, 3, 3, 3, 3, 2, 2, 1]
    totals = np.repeat(theirs.losses, [4, 4, 3])
    batches = np.repeat(_SIZES, [4, 4, 3])
    np.testing.assert_allclose(seen, totals * sizes / batches, rtol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_an_optimizer_of_the_model_fn_ignores_the_reduction(reduction):
    def loss_fn(outputs):
        return v1.get_variable("scale", initializer=1.0) * _info_nce(outputs)

    def train_op(loss):
        descent = v1.train.GradientDescentOptimizer(0.5)
        return descent.minimize(loss, v1.train.get_global_step())

    model_fn = _model(loss_fn, train_op=train_op)
    _assert_same(_Run(model_fn, 4, reduction=reduction), _Run(model_fn))


def _towers_again(features):
    with v1.variable_scope("", reuse=True):
        return _towers(features)


@pytest.mark.once
def test_outputs_are_tensors_of_any_dtype_in_any_structure():
    def outputs(features, labels, towers):
        return {
            "towers": [tf.cast(towers[0], tf.float64), tf.cast(towers[1], tf.bfloat16)],
            "labels": (labels, tf.as_string(labels), tf.equal(labels % 2, 0)),
            "matrix": towers[0][:, :, None] * towers[1][:, None, :],
        }

    def loss_fn(parts):
        labels, strings, is_even = parts["labels"]
        towers = [tf.cast(tower, tf.float32) for tower in parts["towers"]]
        numbers = tf.strings.to_number(strings) + tf.cast(labels + 1, tf.float32)
        factors = tf.where(is_even, numbers, -numbers)
        hard = tf.gather(towers[0], tf.argsort(labels % 3))  # IndexedSlices
        return (
            _info_nce(towers)
            + tf.reduce_mean(factors[:, None] * hard) / 10
            + tf.reduce_mean(tf.square(parts["matrix"]))
        )

    theirs = _Run(_model(loss_fn, outputs))
    _assert_same(_Run(_model(loss_fn, outputs), 1), theirs)
    _assert_same(_Run(_model(loss_fn, outputs), 3), theirs, 1e-3)  # bfloat16


@pytest.mark.once
def test_several_losses_and_train_ops_share_the_passes():
    sizes = []

    def model_fn(features, labels, mode):
        query, document = _towers(features)
        query = _seen(query, sizes)
        first = whole_batch_loss((query, document), _info_nce)
        second = whole_batch_loss(
            query, lambda q: tf.reduce_mean(tf.matmul(q, q, False, True))
        )
        variables = v1.trainable_variables()
        sgd = v1.train.GradientDescentOptimizer(0.1)
        train_ops = [
            make_accumulating_train_op(first, sgd, 1, var_list=variables[:1]),
            make_accumulating_train_op(
                first + 0.3 * second, sgd, 1, var_list=variables, global_step=None
            ),
        ]
        return spec_of(mode, first, tf.group(*train_ops))

    theirs = _Run(model_fn)
    sizes.clear()
    _assert_same(_Run(model_fn, 4), theirs)
    assert len(sizes) == 2 * (4 + 4 + 3)
    _assert_same(_Run(model_fn, 1), theirs)


def test_a_model_fn_with_an_optimizer_of_its_own_trains_too():
    def model_fn(features, labels, mode):
        towers = _towers(features)
        weight = tf.cast(labels + 1, tf.float32)
        mean = tf.reduce_sum(weight * towers[0][:, 0]) / tf.reduce_sum(weight)
        sgd = v1.train.GradientDescentOptimizer(0.1)
        variables = v1.trainable_variables()
        first = sgd.compute_gradients(mean, variables)
        loss = whole_batch_loss(towers, _info_nce)
        pairs = sgd.compute_gradients(loss, variables)
        pairs = [
            (a + (0 if b is None else b), variable)
            for (a, variable), (b, _) in zip(pairs, first, strict=True)
        ]
        train_op = sgd.apply_gradients(pairs, v1.train.get_global_step())
        return spec_of(mode, loss, train_op)

    theirs = _Run(model_fn)
    for micro_batches in (1, 4):
        _assert_same(_Run(model_fn, micro_batches), theirs)


@pytest.mark.once
def test_recomputed_towers_are_those_of_the_batch_at_once():
    def outputs(features, labels, towers):
        layer = recompute(lambda x: tf.nn.dropout(_tower(tf.exp(x), "again"), 0.0))
        return layer(features["query"]), towers[1]

    ours, theirs = (_Run(_model(outputs=outputs), number) for number in (3, None))
    _assert_same(ours, theirs, 5e-6)  # exp() makes larger gradients, and rounding


_DRAWS = {
    "dropout": lambda x: tf.nn.dropout(x, 0.5),
    "keras dropout": lambda x: tf.keras.layers.Dropout(0.5)(x, training=True),
    "recomputed": lambda x: recompute(lambda y: tf.nn.dropout(tf.exp(y), 0.5))(x),
    "normal": lambda x: x + tf.random.normal(tf.shape(x)),
    "truncated normal": lambda x: x + tf.random.truncated_normal(tf.shape(x)),
    "integers": lambda x: (
        x + tf.cast(tf.random.uniform(tf.shape(x), 0, 99, tf.int32), "float32")
    ),
    "classes": lambda x: x + tf.cast(tf.random.categorical(x, 4), "float32"),
    "stateless": lambda x: tf.nn.experimental.stateless_dropout(
        x, 0.5, micro_batch_seed("x")
    ),
}


def _draw_all(features, labels, towers):
    query, document = towers
    return query, document, *(draw(query) for draw in _DRAWS.values())


def _use_all(outputs):
    return _info_nce(outputs) + sum(tf.reduce_mean(tf.square(o)) for o in outputs[2:])


def test_random_numbers_are_the_same_in_both_passes():
    seen = {name: [] for name in _DRAWS}

    def outputs(features, labels, towers):
        query, document, *drawn = _draw_all(features, labels, towers)
        pairs = zip(drawn, seen.values(), strict=True)
        return query, document, *(_seen(tensor, arrays) for tensor, arrays in pairs)

    _Run(_model(_use_all, outputs), 3, sizes=(12, 12))
    for name, arrays in seen.items():
        for i in (0, 1, 2, 6, 7, 8):
            np.testing.assert_array_equal(arrays[i], arrays[i + 3], name)
    masks = [(values == 0).tobytes() for values in seen["dropout"]]
    assert len(set(masks)) == 6  # of three micro-batches in two updates


def test_a_random_number_that_is_used_again_is_the_same_one():
    """It also covers operations that the model_fn makes after the call."""
    seen = []

    def model_fn(features, labels, mode):
        query, document = _towers(features)
        noise = tf.random.normal(tf.shape(query))
        loss = whole_batch_loss((_seen(query + noise, seen), document), _info_nce)
        loss += 1e-9 * tf.reduce_sum(_seen(query + noise, seen))
        return spec_of(mode, loss, _by_train_op(loss))

    _Run(model_fn, 3, sizes=(12,))
    before, seen[:] = [*seen], []
    _Run(model_fn, 3, sizes=(12,))
    assert {x.tobytes() for x in seen} == {x.tobytes() for x in before}
    assert len(seen) == 9
    for i in range(3):
        assert sum(np.array_equal(seen[i], other) for other in seen) == 3


def test_averages_of_batch_normalization_are_updated_once_a_micro_batch():
    def model_fn(features, labels, mode):
        query = v1.layers.batch_normalization(
            features["query"], training=True, momentum=0.5, name="norm", fused=False
        )
        loss = whole_batch_loss(
            _tower(query, "q"), lambda q: tf.reduce_mean(q @ tf.transpose(q))
        )
        return spec_of(mode, loss, _by_train_op(loss))

    features = []
    with tf.Graph().as_default(), v1.Session() as session:
        features = session.run(_next_batch((12,))[0]["query"])
    expected = np.zeros(_WIDTH)
    for part in np.split(features, 3):
        expected = 0.5 * expected + 0.5 * part.mean(0)
    mean = _Run(model_fn, 3, sizes=(12,)).values["norm/moving_mean"]
    np.testing.assert_allclose(mean, expected, rtol=1e-5)


def test_elsewhere_it_is_loss_fn_of_the_outputs():
    outputs = tf.constant([[1.0, 2.0]]), [tf.constant([3])]
    assert whole_batch_loss(outputs, lambda values: values) is outputs
    seen = []

    def model_fn(features, labels, mode):
        loss = _seen(whole_batch_loss(_towers(features), _info_nce), seen)
        sgd = v1.train.GradientDescentOptimizer(0.0)
        return spec_of(mode, loss, make_accumulating_train_op(loss, sgd, 3))

    run = _Run(model_fn)
    np.testing.assert_allclose(run.losses, seen)  # of the micro-batches


@pytest.mark.once
def test_what_loss_fn_makes_is_the_whole_batchs():
    """`batch_mean` and `micro_batch_seed` inside of it, and tensors that it gives away."""
    means, seeds = [], []

    def model_fn(features, labels, mode):
        def loss_fn(outputs):
            seed = micro_batch_seed("in loss_fn")
            mean = batch_mean(tf.reduce_mean(outputs[0]))
            v1.add_to_collection("fetched", _seen(mean, means))
            noise = tf.cast(tf.reduce_sum(_seen(seed, seeds)), tf.float32)
            return _info_nce(outputs) + 1e-30 * noise * whole_batch_loss(
                mean, lambda x: x
            )

        loss = whole_batch_loss(_towers(features), loss_fn)
        return spec_of(mode, loss, _by_train_op(loss))

    theirs = _Run(model_fn)
    seeds.clear()
    ours = _Run(model_fn, 3)
    np.testing.assert_allclose(ours.fetched, theirs.fetched, rtol=1e-5)
    assert len({tuple(seed) for seed in seeds}) == 3  # one for each batch


class _Memory:
    """Runs out of memory, in the forward or the backward pass, above some examples.

    Attributes:
        tried: Numbers of examples that were tried; the backward pass does not need what
            the forward pass allocates.
    """

    def __init__(self, forward: int = 99, backward: int = 99):
        self._most = {"forward": forward, "backward": backward}
        self.tried = {"forward": [], "backward": []}

    def layer(self, x: tf.Tensor) -> tf.Tensor:
        """Returns `x`."""

        def check(place):
            def allocate(rows):
                self.tried[place].append(len(rows))
                if len(rows) > self._most[place]:
                    raise MemoryError(f"{len(rows)} rows")
                return np.float32(1)

            return lambda rows: tf.reshape(
                tf.numpy_function(allocate, [rows], tf.float32, stateful=False), []
            )

        @tf.custom_gradient
        def layer(x):
            return x * check("forward")(x), lambda dy: dy * check("backward")(dy)

        return layer(x)


@pytest.mark.parametrize(
    ("memory", "forward", "backward"),
    [
        # 12 and 6 do not fit in the first pass.
        (_Memory(forward=4), [12, 6, *[3] * 4], [3] * 4),
        # They do not fit in the second one, after the loss.
        (_Memory(backward=4), [12, 6, 6, *[3] * 4], [12, 6, *[3] * 4]),
    ],
)
def test_both_passes_are_retried_in_more_micro_batches(memory, forward, backward):
    seen = []

    def outputs(features, labels, towers):
        query = _seen(tf.nn.dropout(towers[0], 0.5), seen)
        return memory.layer(query), towers[1]

    # TensorFlow optimizes the graph: what a pass does not need must not run.
    ours = _Run(_model(outputs=outputs), "auto", sizes=(12,), config=None)
    assert memory.tried == {"forward": forward, "backward": backward}
    first, second = seen[-8:-4], seen[-4:]
    np.testing.assert_array_equal(first, second)
    memory = _Memory()
    theirs = _Run(_model(outputs=outputs), 4, sizes=(12,), config=None)
    _assert_same(ours, theirs, 0)


def test_a_loss_that_alone_does_not_fit_is_named():
    def loss_fn(outputs):
        return _info_nce((_Memory(forward=4).layer(outputs[0]), outputs[1]))

    with pytest.raises(
        ValueError, match="must fit in memory. Received: 12 examples at"
    ):
        _Run(_model(loss_fn), "auto")
    with pytest.raises(tf.errors.ResourceExhaustedError):
        _Run(_model(loss_fn), 3)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_an_evaluation_in_micro_batches_reports_the_loss_of_the_whole_batch(
    reduction, tmp_path
):
    """No gradient is computed that nobody asks for."""
    differentiated = []

    @tf.custom_gradient
    def loss_fn(*outputs):
        return _info_nce(outputs), differentiated.append

    def model_fn(features, labels, mode):
        loss = whole_batch_loss(_towers(features), lambda outputs: loss_fn(*outputs))
        return tf.estimator.EstimatorSpec(mode, loss=loss)

    (tmp_path / "micro_batches-eval.json").write_text('{"micro_batches": 5}')
    config = tf.estimator.RunConfig(str(tmp_path))
    with tf.Graph().as_default():
        v1.train.get_or_create_global_step()
        spec = microbatch_model_fn(model_fn, "auto", reduction=reduction)(
            *_next_batch(_SIZES), tf.estimator.ModeKeys.EVAL, config=config
        )
        with v1.train.SingularMonitoredSession(spec.evaluation_hooks) as session:
            losses = [session.run(spec.loss) for _ in _SIZES]
    np.testing.assert_allclose(losses, _losses_at_the_start(), rtol=1e-6)
    assert not differentiated


def test_a_replica_that_has_never_had_examples_evaluates_none(tmp_path):
    def model_fn(features, labels, mode):
        loss = whole_batch_loss(_towers(features), _info_nce)
        ops = {"mean": v1.metrics.mean(labels)}
        return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=ops)

    def input_fn():
        """Returns batches of 4 and of no examples, for replicas in turn."""
        sizes = tf.data.Dataset.from_tensor_slices([4, 0])

        def batch(size):
            labels = tf.range(size)
            x = tf.cast(labels[:, None], tf.float32) * tf.ones([_WIDTH])
            return {"query": x, "document": x}, labels

        return sizes.map(batch)

    (tmp_path / "micro_batches-eval.json").write_text('{"micro_batches": 2}')
    config = tf.estimator.RunConfig(
        str(tmp_path), eval_distribute=two_replicas(), session_config=TWO_CPUS
    )
    metrics = tf.estimator.Estimator(
        microbatch_model_fn(model_fn), config=config
    ).evaluate(input_fn)
    assert metrics["mean"] == np.mean(range(4))


def test_a_gradient_that_is_first_taken_after_the_model_fn_is_refused():
    losses = []

    def model_fn(features, labels, mode):
        losses.append(whole_batch_loss(_towers(features), _info_nce))
        return tf.estimator.EstimatorSpec(mode, loss=losses[0])

    with tf.Graph().as_default():
        v1.train.get_or_create_global_step()
        mode = tf.estimator.ModeKeys.EVAL
        microbatch_model_fn(model_fn, "auto")(*_next_batch(_SIZES), mode)
        with pytest.raises(ValueError, match="must be made in the model_fn. Received:"):
            tf.gradients(losses, v1.trainable_variables())


def _losses_at_the_start() -> list[float]:
    with tf.Graph().as_default(), v1.Session() as session:
        loss = _info_nce(_towers(_next_batch(_SIZES)[0]))
        session.run(v1.global_variables_initializer())
        return [session.run(loss) for _ in _SIZES]


def _count(x):
    zero = v1.zeros_initializer()
    counter = v1.get_variable("counter", [], tf.float32, zero, trainable=False)
    return x + 0 * v1.assign_add(counter, 1.0)


def _print(x):
    with tf.control_dependencies([tf.print("x")]):
        return tf.identity(x)


def _read_and_written(x):
    zero = v1.zeros_initializer()
    mean = v1.get_variable("mean", [4], tf.float32, zero, trainable=False)
    v1.add_to_collection(
        v1.GraphKeys.UPDATE_OPS, v1.assign(mean, tf.reduce_mean(x, 0)).op
    )
    return x - mean


def _in_branch(layer):
    return lambda x: tf.cond(tf.shape(x)[0] > 0, lambda: layer(x), lambda: x)


def _in_function(layer):
    return lambda x: tf.function(layer, autograph=False)(x)


_REFUSED_LAYERS = [
    (_count, r"computed twice.*AssignAddVariableOp"),
    (_print, r"computed twice.*PrintV2"),
    (lambda x: tf.random.shuffle(x), "computed twice.*RandomShuffle"),
    (_in_branch(lambda x: tf.nn.dropout(x, 0.5)), "computed twice"),
    (_in_function(lambda x: tf.nn.dropout(x, 0.5)), "StatefulPartitionedCall"),
    (_in_function(_in_branch(_print)), "StatefulPartitionedCall"),
    (_read_and_written, "no micro-batch must change a variable.*Received: mean,"),
]


@pytest.mark.parametrize(("layer", "message"), _REFUSED_LAYERS)
def test_what_must_not_run_twice_is_refused(layer, message):
    model_fn = _model(outputs=lambda f, labels, towers: (layer(towers[0]), towers[1]))
    with pytest.raises(ValueError, match=message):
        _Run(model_fn, 3)


def _table(x):
    words = tf.constant(["a", "b"])
    initializer = tf.lookup.KeyValueTensorInitializer(words, [0.5, 2.0])
    table = tf.lookup.StaticHashTable(initializer, 1.0)
    return x * table.lookup(words[:1])


def _loop(x):
    return tf.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, tf.sin(y)), (0, x))[1]


def test_branches_functions_tables_and_checks_without_effects_are_allowed():
    def outputs(features, labels, towers):
        kernel = v1.get_variable("kernel", initializer=np.eye(4, dtype=np.float32))
        x = _in_branch(_in_function(lambda y: tf.matmul(y, kernel)))(towers[0])
        x = tf.debugging.check_numerics(_table(_loop(x)), "x")
        with tf.control_dependencies([tf.debugging.assert_less(x, 99.0)]):
            return tf.identity(x), towers[1]

    _assert_same(_Run(_model(outputs=outputs), 3), _Run(_model(outputs=outputs)))


_NOT_OUTPUTS = [
    (lambda towers: [*towers, None], TypeError, "must be Tensors. Received: NoneType"),
    (
        lambda towers: [*towers, tf.sparse.from_dense(towers[0])],
        TypeError,
        "must be Tensors. Received: SparseTensor",
    ),
    (lambda towers: tf.complex(*towers), TypeError, "real. Received: .* complex64"),
    (
        lambda towers: [*towers, tf.constant(1.0)],
        ValueError,
        r"one row for each example.*Received: .* of shape \(\)",
    ),
    (
        lambda towers: [*towers, tf.ones([3, 4])],
        tf.errors.InvalidArgumentError,
        r"one row for each example",
    ),
    (
        lambda towers: [*towers, towers[0][:, : tf.shape(towers[0])[0]]],
        tf.errors.InvalidArgumentError,
        r"one row for each example, of one shape",
    ),
    (
        lambda towers: [*towers, tf.repeat(towers[0], 2, axis=0)],
        tf.errors.InvalidArgumentError,
        r"one row for each example",
    ),
]


@pytest.mark.parametrize(("change", "error", "message"), _NOT_OUTPUTS)
def test_outputs_without_a_row_for_each_example_are_refused(change, error, message):
    model_fn = _model(outputs=lambda features, labels, towers: change(towers))
    with pytest.raises(error, match=message):
        _Run(model_fn, 3, sizes=(5,))


def _lookup(outputs):
    table = v1.get_variable("table", [3, 4])
    return _info_nce(outputs) + tf.reduce_mean(tf.gather(table, [0, 1]))


def _counting(outputs):
    return _count(_info_nce(outputs))


def _normalizing(outputs):
    normalized = v1.layers.batch_normalization(outputs[0], training=True, name="norm")
    return _info_nce([normalized, outputs[1]])


_REFUSED_LOSSES = [
    (_lookup, "must not look up rows.*Received: table"),
    (_counting, "must change no variable.*Received: counter"),
    (_normalizing, "must change no variable.*Received: norm/moving_mean"),
    (lambda outputs: outputs[0], "must be a scalar"),
]


@pytest.mark.parametrize(("loss_fn", "message"), _REFUSED_LOSSES)
def test_losses_that_would_be_wrong_are_refused(loss_fn, message):
    with pytest.raises(ValueError, match=message):
        _Run(_model(loss_fn), 3)


def test_variables_of_loss_fn_have_the_names_that_they_have_without():
    def loss_fn(outputs):
        head = tf.keras.layers.Dense(4, name="head")
        return _info_nce([head(output) for output in outputs])

    ours, theirs = (_Run(_model(loss_fn), count, (5,)).values for count in (2, None))
    assert ours.keys() == theirs.keys() >= {"head/kernel", "head/bias"}


def test_loss_fn_must_not_use_a_tensor_of_the_micro_batch():
    def model_fn(features, labels, mode):
        towers = _towers(features)
        return whole_batch_loss(towers, lambda outputs: _info_nce(towers))

    with pytest.raises(
        ValueError, match="no tensor of a micro-batch. Received: .*begin"
    ):
        _Run(model_fn, 3)


def test_places_and_weights_that_do_not_fit_are_refused():
    def in_branch(towers):
        make = lambda: whole_batch_loss(towers, _info_nce)
        return tf.cond(tf.constant(True), make, make)

    def of_another(towers):
        other = whole_batch_loss(towers, _info_nce)
        return whole_batch_loss((towers[0] * other, towers[1]), _info_nce)

    def weighted(towers):
        loss = whole_batch_loss(towers, _info_nce)
        return _by_train_op(loss, weight=tf.constant(2.0))

    def summed(towers):
        return _by_train_op(whole_batch_loss(towers, _info_nce), reduction="sum")

    for make, message in (
        (in_branch, "in the model_fn itself. Received: a tf.function, branch or loop"),
        (of_another, "must not be computed from another whole_batch_loss"),
        (weighted, "must not be weighted by micro-batch. Received: a `weight`"),
        (summed, "must not be weighted by micro-batch. Received: 'sum'"),
    ):
        with pytest.raises(ValueError, match=message):
            _Run(lambda features, labels, mode, m=make: m(_towers(features)), 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss_fn": 1.0}, "`loss_fn` must be a function"),
        ({"across_replicas": 1}, "`across_replicas` must be True or False"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(TypeError, match=message):
        whole_batch_loss(**({"outputs": 1.0, "loss_fn": abs} | arguments))
