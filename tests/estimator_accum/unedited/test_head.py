"""The head of a cut batch: declarations, random numbers, look-ups, refusals."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import AccumulatingOptimizer, per_example
from estimator_accum.graph.names import draws_by_state
from tests.helpers.models import model_fns
from tests.helpers.models.examples import make_dataset
from tests.helpers.models.interception import build, cut, train
from tests.helpers.models.microbatch_runs import spec_of
from tests.helpers.models.toy_models import relative_difference
from tests.helpers.tables import first

v1 = tf.compat.v1
_X = np.random.default_rng(0).normal(size=(18, 4)).astype(np.float32)
_Y = np.arange(18, dtype=np.float32)
_BATCH = ({"x": _X}, _Y)


def _model_fn(loss_of, make_optimizer=v1.train.GradientDescentOptimizer):
    """Returns a model_fn with the loss `loss_of(x, labels, weights)`."""

    def model_fn(features, labels, mode):
        weights = v1.get_variable("weights", initializer=np.ones([4, 1], np.float32))
        loss = loss_of(features["x"], labels, weights)
        step = v1.train.get_or_create_global_step()
        return spec_of(mode, loss, make_optimizer(0.1).minimize(loss, step))

    return model_fn


def _accumulating(rate):
    return AccumulatingOptimizer(v1.train.GradientDescentOptimizer(rate), 1)


def _errors(x, labels, weights):
    return (tf.matmul(x, weights)[:, 0] - labels) ** 2


_SUMS = {
    "sum": lambda *tensors: tf.reduce_sum(_errors(*tensors)),
    "sum and penalty": lambda x, y, w: (
        0.5 * tf.reduce_sum(_errors(x, y, w)) + tf.nn.l2_loss(w)
    ),
    "losses": lambda x, y, w: v1.losses.mean_squared_error(
        y, tf.matmul(x, w)[:, 0], reduction=v1.losses.Reduction.SUM
    ),
    "weights of the input pipeline": lambda x, y, w: tf.einsum(
        "b,b->", _errors(x, y, w), y
    ),
    "scan": lambda *tensors: tf.scan(tf.add, _errors(*tensors))[-1],
}


@pytest.mark.parametrize("name", _SUMS)
def test_a_sum_that_is_declared_as_a_mean_is_refused(name):
    sentence = (
        r"must be declared as a sum\. Received: .*Pass reduction='sum'.* If it has weights "
        r"that the input pipeline normalizes, declare reduction='sum'"
    )
    with pytest.raises(ValueError, match=sentence):
        build(_model_fn(_SUMS[name], _accumulating), _BATCH)
    build(_model_fn(_SUMS[name], _accumulating), _BATCH, reduction="sum")


def test_a_sum_beside_a_mean_is_refused():
    def loss_of(x, labels, weights):
        return tf.reduce_mean(_errors(x, labels, weights)) + tf.nn.l2_loss(x @ weights)

    with pytest.raises(ValueError, match="all be sums.*adds a sum over the examples"):
        build(_model_fn(loss_of, _accumulating), _BATCH)


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda *tensors: tf.reduce_mean(_errors(*tensors)),
        lambda *tensors: tf.reduce_mean(_errors(*tensors)) + tf.nn.l2_loss(tensors[2]),
        lambda x, y, w: tf.reduce_sum(_errors(x, y, w)) / tf.reduce_sum(y),
        lambda x, y, w: tf.reduce_sum(tf.reduce_mean(tf.matmul(x, w), 0)),
    ],
)
def test_what_is_no_sum_may_be_declared_as_a_mean(loss_of):
    build(_model_fn(loss_of, _accumulating), _BATCH)


def _by_python(function):
    def loss_of(x, labels, weights):
        rows = tf.numpy_function(function, [x], tf.float32)
        rows = per_example(tf.ensure_shape(rows, [None, 4]))
        return tf.reduce_mean(_errors(rows, labels, weights))

    return _model_fn(loss_of)


def test_a_python_function_that_is_declared_per_example_gets_micro_batches():
    sizes = []

    def square(x):
        sizes.append(len(x))
        return x**2

    theirs, _ = train(_by_python(lambda x: x**2), _BATCH)
    ours, _ = train(cut(_by_python(square)), _BATCH)
    assert relative_difference(ours, theirs) <= 2e-6
    assert sizes[-4:] == [5, 5, 5, 3]


def test_a_model_fn_is_called_once_and_again_for_a_static_number_of_examples():
    calls = []

    def input_fn():
        return tf.data.Dataset.from_tensor_slices(_BATCH).batch(16)

    def loss_of(*tensors):
        calls.append("loss_of")
        return tf.reduce_mean(_errors(*tensors))

    train(cut(_model_fn(loss_of)), input_fn)
    assert calls == ["loss_of"]
    train(cut(_model_fn(loss_of)), _BATCH)
    assert calls == 3 * ["loss_of"]


def test_a_declaration_that_is_wrong_is_refused_before_the_first_update():
    model_fn = _by_python(lambda x: x - x.mean(0))
    with pytest.raises(ValueError, match=r"whose rows change with 3 others of the ex"):
        train(cut(model_fn), _BATCH)


def test_a_scalar_has_no_example():
    with (
        tf.Graph().as_default(),
        pytest.raises(ValueError, match="along its first axi"),
    ):
        per_example(tf.constant(1.0))


def test_a_row_that_is_looked_up_in_another_example_stops_the_training():
    """As a place in a text that is longer than the text: the keys saw good ones."""

    def loss_of(x, labels, weights):
        flat = tf.reshape(x, [-1])
        places = tf.cast(labels, tf.int32) % 4
        places += 4 * tf.cast(tf.equal(labels, 12.0), tf.int32)
        chosen = tf.gather(flat, places + tf.range(tf.shape(x)[0]) * 4)
        return tf.reduce_mean((chosen * weights[0, 0] - 1.0) ** 2)

    with pytest.raises(ValueError, match="only look up values of its own. Received: "):
        train(cut(_model_fn(loss_of)), _BATCH)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: tf.random.uniform([], 1.0, 2.0),
        lambda: 1.0 + tf.abs(tf.random.normal([1])),
    ],
)
def test_a_random_number_without_examples_is_one_number_for_the_batch(draw):
    """Such as the share of a mixture: then the loss is linear in it."""

    def loss_of(x, labels, weights):
        return tf.reduce_mean(tf.matmul(draw() * tf.ones_like(x), weights))

    values, (loss,) = train(cut(_model_fn(loss_of)), _BATCH)
    # loss = number * 4, and each weight's gradient is the number.
    moved = (1.0 - values["weights"]) / 0.1
    np.testing.assert_allclose(moved, np.full([4, 1], loss / 4), rtol=1e-5)


def _sampled(name: str):
    """Returns a function that draws classes, and how often they are expected."""

    def draw(n):
        options = {"num_true": 1, "num_sampled": 3, "unique": True, "range_max": 9}
        if name == "AllCandidateSampler":
            options["num_sampled"] = options.pop("range_max")
        if name == "FixedUnigramCandidateSampler":
            options["unigrams"] = [1.0] * 9
        classes = tf.zeros([n, 1], tf.int64)
        return getattr(tf.raw_ops, name)(true_classes=classes, **options)

    return draw


def _boxed(n):
    boxes = tf.reshape([0.1, 0.1, 0.9, 0.9], [1, 1, 4])
    box = tf.image.sample_distorted_bounding_box([n + 9, 9, 3], boxes, 0, 0.1)
    return box[0], box[2]


# Each type of operation that draws from a state, with a number of numbers.
_DRAWS = {
    "RandomUniform": lambda n: tf.random.uniform([n]),
    "RandomUniformInt": lambda n: tf.random.uniform([n], 1, 9, tf.int32),
    "RandomStandardNormal": lambda n: tf.random.normal([n]),
    "TruncatedNormal": lambda n: tf.random.truncated_normal([n]),
    "Multinomial": lambda n: v1.multinomial(tf.zeros([n, 5]), 1)[:, 0],
    "RandomGamma": lambda n: tf.random.gamma([n], 2.0),
    "RandomPoissonV2": lambda n: tf.random.poisson([n], 2.0),
    "RandomShuffle": lambda n: tf.random.shuffle(tf.range(n)),
    "ParameterizedTruncatedNormal": lambda n: tf.raw_ops.ParameterizedTruncatedNormal(
        shape=[n], means=0.0, stdevs=1.0, minvals=-1.0, maxvals=1.0, seed=1, seed2=2
    ),
    "SampleDistortedBoundingBox": lambda n: tf.raw_ops.SampleDistortedBoundingBox(
        image_size=[n + 9, 9, 3], bounding_boxes=[[[0.1, 0.1, 0.9, 0.9]]]
    )[0],
    "SampleDistortedBoundingBoxV2": _boxed,
    **{
        f"{kind}CandidateSampler": _sampled(f"{kind}CandidateSampler")
        for kind in ("All", "FixedUnigram", "LogUniform", "Uniform")
    },
}


def test_every_type_that_draws_from_a_state_is_tried():
    kinds = filter(draws_by_state, dir(tf.raw_ops))
    removed = {"RandomCrop", "RandomPoisson"}  # from TensorFlow's graphs
    assert {*kinds} - removed == _DRAWS.keys()


# Of the others, test_rows has those that draw from given seeds; the rest is one line,
# which the test above compares.
_FIRST = {("RandomUniform", "of the batch"), ("Multinomial", "of the batch")}
_FIRST |= {("RandomGamma", "of the batch"), ("RandomPoissonV2", "shared")}
_FIRST |= {("RandomShuffle", "of the batch"), ("RandomShuffle", "shared")}
_FIRST |= {("ParameterizedTruncatedNormal", "of the batch")}
_FIRST |= {("SampleDistortedBoundingBox", "of the batch")}


@pytest.mark.parametrize(
    ("kind", "whose"),
    first(itertools.product(_DRAWS, ["of the batch", "shared"]), _FIRST),
)
def test_all_micro_batches_share_one_draw_of_the_batch(kind, whose):
    of_batch = whose == "of the batch"

    def loss_of(x, labels, weights):
        parts = tf.nest.flatten(_DRAWS[kind](tf.shape(x)[0] if of_batch else 3))
        number = sum(
            tf.reduce_sum(
                tf.cast(part, tf.float32)
                * tf.cast(tf.range(1, tf.size(part) + 1), tf.float32)
                if part.shape.rank == 1
                else tf.cast(part, tf.float32)
            )
            for part in parts
        )
        return tf.reduce_mean(tf.matmul(x, weights) * 0.0) + number * weights[0, 0]

    values, (loss,) = train(cut(_model_fn(loss_of)), _BATCH)
    moved = (1.0 - values["weights"][0, 0]) / 0.1
    np.testing.assert_allclose(moved, loss, rtol=1e-4)
    if kind == "RandomShuffle" and of_batch:
        assert loss > 18 * 17 / 2  # one order of 18 examples, not four of a few


@pytest.mark.parametrize("kind", ["RandomGamma", "RandomPoissonV2"])
def test_each_example_draws_by_its_own_parameter(kind):
    """And the micro-batches run twice, since the loss combines the rows."""

    def loss_of(x, labels, weights):
        rates = tf.nn.softplus(x[:, 0])
        draw = tf.random.gamma if kind == "RandomGamma" else tf.random.poisson
        drawn = draw([], rates)
        products = tf.matmul(x * drawn[:, None] * 0.0 + drawn[:, None], weights)
        return tf.reduce_sum(tf.sort(products[:, 0]))

    values, (loss,) = train(cut(_model_fn(loss_of)), _BATCH)
    moved = (1.0 - values["weights"]) / 0.1
    np.testing.assert_allclose(moved, np.full([4, 1], loss / 4), rtol=1e-5)


def test_sampled_classes_are_those_of_the_batch():
    """Every class is sampled, so the plain weights are known."""

    def model_fn(features, labels, mode):
        start = v1.random_normal_initializer(seed=1)
        table = v1.get_variable("table", [5, 3], initializer=start)
        bias = v1.get_variable("bias", [5], initializer=v1.zeros_initializer())
        kernel = v1.get_variable("kernel", [4, 3], initializer=start)
        hidden = tf.tanh(tf.matmul(features["x"], kernel))
        classes = tf.cast(labels[:, None], tf.int64) % 5
        losses = [
            f(table, bias, classes, hidden, 5, 5)
            for f in (tf.nn.sampled_softmax_loss, tf.nn.nce_loss)
        ]
        loss = tf.reduce_mean(tf.add_n(losses))
        step = v1.train.get_or_create_global_step()
        adam = v1.train.AdamOptimizer(0.1).minimize(loss, step)
        return spec_of(mode, loss, adam)

    theirs, expected = train(model_fn, _BATCH, 3)
    ours, losses = train(cut(model_fn), _BATCH, 3)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert relative_difference(ours, theirs) <= 1e-5


def test_what_the_head_draws_is_drawn_once():
    def loss_of(x, labels, weights):
        products = tf.matmul(x, weights)[:, 0]
        ranked = tf.sort(products)  # combines examples: what follows is the head
        drawn = tf.random.uniform(tf.shape(ranked), 1.0, 2.0)
        return (
            tf.reduce_sum(drawn * tf.stop_gradient(ranked * 0.0 + 1.0)) * weights[0, 0]
        )

    values, (loss,) = train(cut(_model_fn(loss_of)), _BATCH)
    moved = (1.0 - values["weights"][0, 0]) / 0.1
    np.testing.assert_allclose(moved, loss, rtol=1e-5)


def test_the_forward_pass_must_not_read_what_it_changes():
    def loss_of(x, labels, weights):
        seen = v1.get_variable("seen", initializer=0.0, trainable=False)
        with tf.control_dependencies([seen.assign(tf.reduce_mean(x))]):
            return tf.reduce_mean(_errors(x * seen.read_value(), labels, weights))

    with pytest.raises(
        ValueError, match=r"Received: (seen|.*of type AssignVariableOp)"
    ):
        build(_model_fn(loss_of), _BATCH)


def test_what_waits_for_the_update_makes_no_second_one():
    """A number that the train op needs of the batch, and is computed behind the update."""
    model_fn = model_fns.model_fn_of(model_fns.EXACT["codebook"][0])
    theirs, _ = train(model_fn, lambda: make_dataset(["x"]), 2)
    ours, _ = train(cut(model_fn), lambda: make_dataset(["x"]), 2)
    assert relative_difference(ours, theirs) <= 1e-9
