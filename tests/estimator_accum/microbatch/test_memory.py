"""Out of memory: the batch is retried in more parts, each example counts once."""

import functools
import itertools
import json
import logging
import random
import re

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import batch_mean, make_accumulating_train_op
from estimator_accum.microbatch.count import MicroBatchCount, is_out_of_memory
from tests.helpers.models import little_memory
from tests.helpers.models.microbatch_runs import (
    by_train_op,
    difference,
    hidden_layer,
    input_fn_of,
    make_model_fn,
    output_layer,
    plain,
    spec_of,
    train,
    train_in_micro_batches,
)
from tests.helpers.models.summaries import read_scalars
from tests.helpers.processes import running
from tests.helpers.tables import rows

pytestmark = pytest.mark.usefixtures("graph_optimizer")
v1 = tf.compat.v1
_INPUT = input_fn_of(examples=10 * 16, batch_size=16)


class Memory(little_memory.Memory):
    """A device with little memory, and the model_fn that is to fit in it."""

    def model_fn(self, optimizer="adam"):
        from_plain = make_model_fn(by_train_op(optimizer))

        def model_fn(features, labels, mode):
            return from_plain({"x": self.allocate(features["x"])}, labels, mode)

        return model_fn


def _train_auto(memory, folder, optimizer="adam", **options):
    model_fn = memory.model_fn(optimizer)
    return train_in_micro_batches(model_fn, folder, _INPUT, "auto", **options)


def _messages(caplog) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "tensorflow.estimator_accum"
        and record.getMessage().startswith("micro-batches")
    ]


def test_a_batch_that_does_not_fit_is_trained_in_micro_batches(tmp_path, caplog):
    memory = Memory(lambda rows: rows <= 5)
    with caplog.at_level(logging.INFO):
        ours = _train_auto(memory, tmp_path / "a")
    theirs = train(make_model_fn(plain("adam")), tmp_path / "plain", _INPUT)
    assert memory.sizes == [16, 8, *[4] * 40]
    assert theirs["global_step"] == ours["global_step"] == 10
    assert difference(ours, theirs) <= 1e-6
    assert _messages(caplog) == [
        "micro-batches 1 -> 2: out of memory at update 1; the batch is retried",
        "micro-batches 2 -> 4: out of memory at update 1; the batch is retried",
    ]
    tag = "accumulation/micro_batches"
    scalars = read_scalars(tmp_path / "a", tag)
    assert scalars == [(tag, 0, 1), (tag, 1, 2), (tag, 1, 4)]


@pytest.mark.once
@pytest.mark.slow  # the allocator waits for ten seconds before it fails
def test_an_error_of_tensorflows_own_allocator_is_retried(tmp_path):
    # A process of its own, since TensorFlow makes one allocator per process.
    limited = {
        "TF_CPU_ALLOCATOR_USE_BFC": "true",
        "TF_CPU_BFC_MEM_LIMIT_IN_MB": "20",
        "TF_ENABLE_ONEDNN_OPTS": "0",  # oneDNN brings an allocator without this limit
    }
    program = ("-m", "tests.helpers.processes.limited_memory")
    done = running.run(*program, tmp_path, **limited)
    assert done.returncode == 0
    assert "1 -> 2: out of memory at update 1; the batch is retried" in done.stderr
    assert float(done.stdout.splitlines()[-1]) <= 1e-6


def test_an_error_that_comes_late_retries_its_own_batch(tmp_path, caplog):
    calls = iter(range(10**6))
    memory = Memory(lambda rows: next(calls) < 7 or rows <= 4)
    with caplog.at_level(logging.INFO):
        ours = _train_auto(memory, tmp_path / "a", "sgd")
    theirs = train(make_model_fn(plain("sgd")), tmp_path / "plain", _INPUT)
    assert memory.sizes == [16] * 8 + [8] + [4] * 12
    assert difference(ours, theirs) <= 5e-7
    assert "1 -> 2: out of memory at update 8" in _messages(caplog)[0]


def test_the_next_run_begins_where_memory_sufficed(tmp_path):
    first = Memory(lambda rows: rows <= 4)
    _train_auto(first, tmp_path)
    file = tmp_path / "micro_batches.json"
    assert json.loads(file.read_text()) == {"micro_batches": 4}
    second = Memory(lambda rows: rows <= 4)
    ours = _train_auto(second, tmp_path)
    assert second.sizes == [4] * 40
    assert ours["global_step"] == 20


@pytest.mark.parametrize(
    "text",
    [
        *("", "[4]", '{"micro_batches": 0}', '{"micro": 1}', '{"micro_batches": true}'),
        pytest.param("[" * 100_000, id="nested"),
    ],
)
def test_an_unreadable_number_of_micro_batches_names_its_file(text, tmp_path):
    (tmp_path / "micro_batches.json").write_text(text)
    with pytest.raises(ValueError, match=r"micro_batches\.json must hold .*Received: "):
        _train_auto(Memory(lambda rows: True), tmp_path)


def test_fewer_micro_batches_are_tried_after_updates_that_fit(tmp_path, caplog):
    memory = Memory(lambda rows: rows <= 8)
    (tmp_path / "micro_batches.json").write_text('{"micro_batches": 8}')
    with caplog.at_level(logging.INFO):
        _train_auto(memory, tmp_path, grow_after=2)
    # Two updates each in 8, 4 and 2; then 1 fails, and the wait doubles to 4 updates.
    assert memory.sizes == [2] * 16 + [4] * 8 + [8] * 4 + [16] + [8] * 8
    assert _messages(caplog) == [
        "micro-batches 8 -> 4: fitted in memory 2 times, until update 2",
        "micro-batches 4 -> 2: fitted in memory 2 times, until update 4",
        "micro-batches 2 -> 1: fitted in memory 2 times, until update 6",
        "micro-batches 1 -> 2: out of memory at update 7; the batch is retried",
        "micro-batches 2 -> 1: fitted in memory 4 times, until update 10",
    ]


def test_one_example_that_does_not_fit_is_described(tmp_path):
    memory = Memory(lambda rows: False)
    expected = (
        r"One example must fit in memory\. Received: an example of features\['x'\] "
        r"\[5\], labels \[1\] at update 1, which alone ran out of memory\. Use shorter"
    )
    with pytest.raises(ValueError, match=expected) as caught:
        _train_auto(memory, tmp_path)
    assert memory.sizes == [16, 8, 4, 2, 1]
    assert isinstance(caught.value.__cause__, tf.errors.ResourceExhaustedError)


def test_a_fixed_number_lets_the_error_through(tmp_path):
    memory = Memory(lambda rows: rows <= 4)
    with pytest.raises(tf.errors.ResourceExhaustedError, match="no room"):
        train_in_micro_batches(memory.model_fn(), tmp_path, _INPUT, 2)
    assert memory.sizes == [8]


def test_other_errors_pass_through_untouched(tmp_path):
    def fail(rows):
        raise ZeroDivisionError(f"at {rows} examples")

    memory = Memory(fail)
    with pytest.raises(tf.errors.OpError, match="ZeroDivisionError: at 16 examples"):
        _train_auto(memory, tmp_path)
    assert memory.sizes == [16]


def _exhausted(message):
    return tf.errors.ResourceExhaustedError(None, None, message)


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError(), True),
        (_exhausted("OOM when allocating"), True),
        (_exhausted("MemoryError: no room"), True),
        (tf.errors.InternalError(None, None, "Dst tensor is not initialized."), True),
        (tf.errors.InternalError(None, None, "CUBLAS_STATUS_ALLOC_FAILED"), True),
        (tf.errors.UnknownError(None, None, "CUDNN_STATUS_ALLOC_FAILED"), True),
        (tf.errors.InternalError(None, None, "CUDA_ERROR_OUT_OF_MEMORY: out"), True),
        (tf.errors.UnknownError(None, None, "CUDA error: out of memory"), True),
        (_exhausted("Received message larger than max (5 vs. 4)"), False),
        (tf.errors.InternalError(None, None, "Blas GEMM launch failed"), False),
        (tf.errors.OutOfRangeError(None, None, "End of sequence"), False),
        (tf.errors.UnavailableError(None, None, "CUDA_ERROR_OUT_OF_MEMORY"), False),
        (ValueError("OOM when allocating"), False),
    ],
)
def test_what_counts_as_out_of_memory(error, is_memory):
    assert is_out_of_memory(error) is is_memory


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([4000], "4,000 = 1,000 examples x 4 micro-batches"),
        ([5, 3], "8 = at most 2 examples x 3 micro-batches x 2 replicas"),
        ([6, 4, 0], "10 = at most 2 examples x 4 micro-batches x 3 replicas"),
        ([1, 1], "2 = 1 example x 1 micro-batch x 2 replicas"),
    ],
)
def test_a_split_is_described_by_what_runs(rows, sentence):
    assert MicroBatchCount(4).describe(rows) == sentence


class _Script:
    """Failures in the order of the updates; micro-batches are counted by their begins.

    Args:
        failures: For each update a list of failures, (micro-batch, "begin" or "end").
    """

    def __init__(self, failures: list[list[tuple]]):
        self._failures = iter([*failures, []])
        self.failed = 0
        self.begin_update()

    def begin_update(self):
        self._pending = list(next(self._failures))
        self._index = 0

    def may_fail(self, where: str):
        """Raises MemoryError if a failure is due; called at begin and end of each."""
        if self._pending and self._pending[0] == (self._index, where):
            self._pending.pop(0)
            self._index = 0
            self.failed += 1
            raise MemoryError(where)
        self._index += where == "end"
        return np.float32(0)


def _stateful_model_fn(script: _Script):
    """Returns a model_fn with batch norm, embedding, metric and counter; may fail."""

    def fail(where):
        return tf.numpy_function(lambda: script.may_fail(where), [], tf.float32)

    def model_fn(features, labels, mode):
        x = features["x"]
        with tf.control_dependencies([x, fail("begin")]):
            x = tf.identity(x)
        table = v1.get_variable("table", [6, 4], initializer=v1.ones_initializer())
        ids = tf.cast(tf.abs(x) * 3, tf.int64) % 6
        hidden = tf.reduce_sum(tf.gather(table, ids), 1)
        hidden = v1.layers.batch_normalization(hidden, training=True, momentum=0.9)
        kernel = v1.get_variable("kernel", [4, 1], initializer=v1.ones_initializer())
        loss = tf.reduce_mean(tf.square(tf.matmul(hidden, kernel) - labels))
        _, metric = v1.metrics.mean(loss, name="metric")
        zero = v1.zeros_initializer()
        rows = v1.get_variable("rows", [], tf.int64, zero, trainable=False)
        new = tf.shape(x, out_type=tf.int64)[0]
        count = functools.partial(v1.assign_add, rows, new)
        counted = tf.cond(new > 0, count, lambda: tf.identity(rows))
        v1.add_to_collection("mean", batch_mean(loss))
        adam = v1.train.AdamOptimizer(0.01)
        train_op = make_accumulating_train_op(loss, adam, 1, clip_norm=1.0)
        with tf.control_dependencies([metric, counted, loss]):
            last = fail("end")
        return spec_of(mode, loss, tf.group(train_op, metric, counted, last))

    return model_fn


class _FinalValues(v1.train.SessionRunHook):
    """Records all losses, and all variables (metrics' too) when training ends."""

    def __init__(self, script):
        self._script = script
        self.losses = []

    def begin(self):
        self._means = v1.get_collection("mean")

    def before_run(self, run_context):
        return v1.train.SessionRunArgs(self._means)

    def after_run(self, run_context, run_values):
        self.losses.append(run_values.results[0])
        self._script.begin_update()

    def end(self, session):
        variables = v1.global_variables() + v1.local_variables()
        names = [variable.op.name for variable in variables]
        self.values = dict(zip(names, session.run(variables), strict=True))


def _run_script(failures, folder):
    script = _Script(failures)
    final = _FinalValues(script)
    model_fn, input_fn = _stateful_model_fn(script), input_fn_of(len(failures) * 16, 16)
    train_in_micro_batches(
        model_fn, folder, input_fn, "auto", hooks=[final], grow_after=1
    )
    assert script.failed == sum(map(len, failures)) >= 60
    return final


def test_failures_anywhere_leave_everything_bit_identical(tmp_path):
    """Compares with a run whose micro-batches fail before they have done anything."""
    chance = random.Random(0)
    failures, micro_batches = [], 0
    while sum(map(len, failures)) < 60:
        doublings = 1 + chance.randrange(4)
        failures.append(
            [
                (chance.randrange(2**i), chance.choice(["begin", "end"]))
                for i in range(doublings)
            ]
        )
        failures += [[]] * doublings  # half as many micro-batches in each of them
        micro_batches += 2**doublings + 2**doublings - 1
    failing = _run_script(failures, tmp_path / "a")
    early = [[(0, "begin")] * len(places) for places in failures]
    smooth = _run_script(early, tmp_path / "b")
    assert failing.values["rows"] == 16 * len(failures)
    # A metric is updated once per micro-batch.
    assert failing.values["metric/count"] == micro_batches
    assert failing.values.keys() == smooth.values.keys()
    for name, value in smooth.values.items():
        np.testing.assert_array_equal(failing.values[name], value, err_msg=name)
    assert failing.losses == smooth.losses


def _hash_table():
    return tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)


def _dense_table():
    return tf.lookup.experimental.DenseHashTable(
        tf.int64, tf.int64, 0, empty_key=-1, deleted_key=-2
    )


def _table_of_rows():
    return tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, [0, 0])


def _in_a_branch(write):
    always = tf.greater(v1.train.get_global_step(), -1)
    return tf.cond(always, lambda: tf.group(write()), tf.no_op)


def _counting_model_fn(count_of, script):
    """Returns a model_fn in which `count_of(x)` writes, with every micro-batch."""

    def model_fn(features, labels, mode):
        x = features["x"]
        predicted = output_layer(hidden_layer(x))
        loss = tf.reduce_mean(tf.square(predicted - labels))
        train_op = plain("sgd")(loss) if script is None else by_train_op("sgd")(loss)
        counted = [count_of(x)]
        if script is not None:
            with tf.control_dependencies([*counted, loss]):
                fail = functools.partial(script.may_fail, "end")
                counted.append(tf.numpy_function(fail, [], tf.float32))
        return spec_of(mode, loss, tf.group(train_op, *counted))

    return model_fn


class _Exported(v1.train.SessionRunHook):
    """Records a table when training ends."""

    def __init__(self, script=None):
        self._script = script

    def begin(self):
        (table,) = v1.get_collection("table")
        self._exported = table.export()

    def after_run(self, run_context, run_values):
        if self._script is not None:
            self._script.begin_update()

    def end(self, session):
        keys, values = session.run(self._exported)
        pairs = zip(keys.ravel().tolist(), values.tolist(), strict=True)
        self.values = {key: value for key, value in pairs if key >= 0}


@pytest.mark.parametrize(
    ("make", "is_in_branch"),
    rows(
        itertools.product([_hash_table, _dense_table, _table_of_rows], [False, True]),
        {(_dense_table, True), (_table_of_rows, False)},
    ),
)
def test_a_retried_batch_writes_a_table_once(make, is_in_branch, tmp_path):
    def count_of(x):
        table = make()
        v1.add_to_collection("table", table)
        sizes = tf.cast(tf.abs(x[:, 0]) * 3, tf.int64)
        keys, _, counts = tf.unique_with_counts(sizes, tf.int64)
        shape = [-1] + [1] * (make is _table_of_rows)

        def write():
            return table.insert(keys, table.lookup(keys) + tf.reshape(counts, shape))

        return _in_a_branch(write) if is_in_branch else write()

    inputs = input_fn_of(48, 16)
    theirs = _Exported()
    train(_counting_model_fn(count_of, None), tmp_path / "a", inputs, [theirs])
    script = _Script([[(0, "end"), (1, "end")], [], [(2, "end")]])
    ours, model_fn = _Exported(script), _counting_model_fn(count_of, script)
    train_in_micro_batches(model_fn, tmp_path / "b", inputs, "auto", [ours])
    assert script.failed == 3
    assert theirs.values == ours.values


def _enqueue(x):
    queue = tf.queue.FIFOQueue(1000, tf.float32)
    return queue.enqueue(tf.reduce_sum(x))


def _stage(x):
    return v1.raw_ops.Stage(values=[tf.reduce_sum(x)])


@pytest.mark.parametrize("wrap", [lambda write: write(), _in_a_branch])
@pytest.mark.parametrize("write", [_enqueue, _stage])
def test_what_cannot_be_undone_is_not_retried(write, wrap, tmp_path, caplog):
    def train_with(micro_batches, failures, folder):
        script = _Script(failures)
        model_fn = _counting_model_fn(lambda x: wrap(lambda: write(x)), script)
        inputs = input_fn_of(32, 16)
        return train_in_micro_batches(model_fn, folder, inputs, micro_batches)

    sentence = (
        "must change variables and tables alone.*at update 1. Pass a fixed number"
    )
    train_with("auto", [[]] * 2, tmp_path / "a")  # memory suffices
    assert len(re.findall(f"will not be retried.*{sentence}", caplog.text)) == 1
    with pytest.raises(ValueError, match=sentence):
        train_with("auto", [[(0, "end")]], tmp_path / "b")
    train_with(2, [[]] * 2, tmp_path / "c")  # the remedy


@pytest.mark.once
def test_the_data_set_in_the_graph_is_not_copied(tmp_path, monkeypatch):
    copies = []  # of the graph, and of the constant that holds the data
    node_def, as_graph_def = tf.Operation.node_def.fget, tf.Graph.as_graph_def

    def node_of(operation):
        if operation.type == "Const" and operation.outputs[0].shape[:1] == [160]:
            copies.append(operation.name)
        return node_def(operation)

    def graph_of(*args, **kwargs):
        copies.append("graph")
        return as_graph_def(*args, **kwargs)

    monkeypatch.setattr(tf.Operation, "node_def", property(node_of))
    monkeypatch.setattr(tf.Graph, "as_graph_def", graph_of)
    counts = []
    for name, body in {"plain": make_model_fn(plain("sgd")), "ours": None}.items():
        copies.clear()
        if body is None:
            _train_auto(Memory(lambda rows: True), tmp_path / name, "sgd", max_steps=2)
        else:
            train(body, tmp_path / name, _INPUT, max_steps=2)
        counts.append(len(copies))
    assert counts[0] == counts[1]  # TensorFlow's own, for events and checkpoints
