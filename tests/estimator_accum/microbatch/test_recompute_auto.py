"""Under "auto", layers are recomputed when it saves time, or when nothing else fits."""

import functools
import json
import logging
import time

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import make_accumulating_train_op, recompute
from tests.helpers.models import little_memory
from tests.helpers.models.microbatch_runs import (
    by_train_op,
    difference,
    hidden_layer,
    input_fn_of,
    output_layer,
    plain,
    spec_of,
    train,
    train_in_micro_batches,
)
from tests.helpers.models.summaries import read_scalars

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("graph_optimizer")]
v1 = tf.compat.v1
_ROWS, _UPDATES = 16, 20
_INPUT = input_fn_of(examples=_UPDATES * _ROWS, batch_size=_ROWS)


class Machine:
    """A device with memory for some examples at once, and a clock.

    The log says whether layers are recomputed.

    Args:
        monkeypatch: Pytest's fixture, for the clock.
        caplog: Pytest's fixture.
        kept: Largest micro-batch whose activations can be kept [examples].
        recomputed: Largest micro-batch whose layers can be recomputed [examples].
        secs: Time of an example with recompute; without, it is 1 s. A
            micro-batch takes 4 s more.
    """

    def __init__(self, monkeypatch, caplog, kept, recomputed, secs=1.3):
        caplog.set_level(logging.INFO)
        self._caplog = caplog
        self._limits, self._secs = {False: kept, True: recomputed}, secs
        self.now = 0.0
        self.plans = []  # (examples, whether recomputed) of every micro-batch
        self._runs_of_layer = self._expected_runs = 0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def _is_recomputed(self) -> bool:
        changes = [c for c in _changes(self._caplog) if " -> " in c]
        plan = changes[-1].partition(" -> ")[2] if changes else self._first_plan
        return "with recompute" in plan.partition(":")[0]

    def model_fn(self, features, labels, mode):
        def allocate(rows):
            is_recomputed = self._is_recomputed()
            self.plans.append((int(rows), is_recomputed))
            self.now += 4 + rows * (self._secs if is_recomputed else 1.0)
            if rows > self._limits[is_recomputed]:
                raise MemoryError("no room")
            self._expected_runs += 2 if is_recomputed else 1
            return np.float32(0)

        def note_run(x):
            self._runs_of_layer += 1
            return x

        def layer(x):
            noted = tf.numpy_function(note_run, [x], x.dtype, stateful=False)
            return hidden_layer(tf.ensure_shape(noted, x.shape))

        x = features["x"]
        rows = tf.shape(x)[0]
        with tf.control_dependencies([tf.numpy_function(allocate, [rows], tf.float32)]):
            x = tf.identity(x)
        loss = tf.reduce_mean((output_layer(recompute(layer)(x)) - labels) ** 2)
        optimizer = v1.train.AdamOptimizer(0.01)
        train_op = make_accumulating_train_op(loss, optimizer, 1)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    def train(self, folder, **options):
        is_first = not (folder / "micro_batches.json").exists()
        is_kept = is_first or not _kept(folder).get("recompute")
        self._first_plan = "" if is_kept else "with recompute"
        state = train_in_micro_batches(self.model_fn, folder, _INPUT, "auto", **options)
        assert self._runs_of_layer == self._expected_runs
        return state


@pytest.fixture
def make_machine(monkeypatch, caplog):
    return functools.partial(Machine, monkeypatch, caplog)


def _changes(caplog) -> list[str]:
    rows = [
        record.getMessage().partition("micro-batches ") for record in caplog.records
    ]
    return [change for before, name, change in rows if name and not before]


def _kept(folder) -> dict:
    return json.loads((folder / "micro_batches.json").read_text())


def test_faster_recomputed_layers_replace_micro_batches(make_machine, tmp_path, caplog):
    machine = make_machine(kept=4, recomputed=16, secs=1.1)
    ours = machine.train(tmp_path / "ours")
    assert _changes(caplog) == [
        "1 -> 2: out of memory at update 1; the batch is retried",
        "2 -> 4: out of memory at update 1; the batch is retried",
        "4 -> 2 with recompute: trying recomputed layers",
        "2 with recompute: took 0.80 times as long as 4",
        "2 with recompute -> 1 with recompute: trying recomputed layers",
        "1 with recompute: took 0.84 times as long as 2 with recompute",
    ]
    assert machine.plans == [
        (16, False),
        (8, False),
        *[(4, False)] * 4 * 6,
        *[(8, True)] * 2 * 6,
        *[(16, True)] * 8,
    ]
    assert _kept(tmp_path / "ours") == {"micro_batches": 1, "recompute": True}
    theirs = train(_plain_model_fn, tmp_path / "theirs", _INPUT)
    assert difference(ours, theirs) <= 5e-7


def _plain_model_fn(features, labels, mode):
    loss = tf.reduce_mean((output_layer(hidden_layer(features["x"])) - labels) ** 2)
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=plain("adam")(loss))


def test_slower_recomputed_layers_do_not(make_machine, tmp_path, caplog):
    machine = make_machine(kept=8, recomputed=16, secs=2.0)
    machine.train(tmp_path)
    last = "1 with recompute -> 2: the trial took 1.50 times as long"
    assert _changes(caplog)[-1] == last
    assert machine.plans[-16:] == [(8, False)] * 16
    assert machine.plans.count((16, True)) == 6
    assert _kept(tmp_path) == {"micro_batches": 2, "recompute": False}


def test_one_example_that_does_not_fit_is_recomputed(make_machine, tmp_path, caplog):
    machine = make_machine(kept=0, recomputed=2)
    machine.train(tmp_path)
    assert [change.split(":")[0] for change in _changes(caplog)[3:]] == [
        "8 -> 16",
        "16 -> 16 with recompute",
        "16 with recompute -> 8 with recompute",
        "8 with recompute",
        "8 with recompute -> 4 with recompute",
        "4 with recompute -> 8 with recompute",
    ]
    assert "out of memory at update 13" in _changes(caplog)[-1]
    assert _kept(tmp_path) == {"micro_batches": 8, "recompute": True}


def test_one_example_that_fits_in_no_way_is_described(make_machine, tmp_path):
    machine = make_machine(kept=0, recomputed=0)
    with pytest.raises(
        ValueError, match=r"One example must fit in memory\. Received: "
    ):
        machine.train(tmp_path)
    assert machine.plans[-2:] == [(1, False), (1, True)]


def test_the_next_run_begins_with_the_plan(make_machine, tmp_path):
    (tmp_path / "micro_batches.json").write_text(
        '{"micro_batches": 2, "recompute": true}'
    )
    machine = make_machine(kept=2, recomputed=8)
    machine.train(tmp_path)
    assert machine.plans == [(8, True)] * 2 * _UPDATES


def test_layers_that_always_recompute_are_not_tried_with_recompute(tmp_path):
    memory = little_memory.Memory(lambda rows: rows <= 8)

    def model_fn(features, labels, mode):
        x = memory.allocate(features["x"])
        hidden = recompute(hidden_layer, always=True)(x)
        loss = tf.reduce_mean((output_layer(hidden) - labels) ** 2)
        return spec_of(mode, loss, by_train_op("adam")(loss))

    train_in_micro_batches(model_fn, tmp_path, _INPUT, "auto")
    assert memory.sizes == [16] + [8] * 2 * _UPDATES
    assert _kept(tmp_path) == {"micro_batches": 2}


def test_layers_inside_others_are_switched_with_them(tmp_path):
    def train_with(wrap):
        def model_fn(features, labels, mode):
            hidden = wrap(lambda x: tf.sin(wrap(hidden_layer)(x)))(features["x"])
            loss = tf.reduce_mean((output_layer(hidden) - labels) ** 2)
            optimizer = v1.train.AdamOptimizer(0.01)
            train_op = make_accumulating_train_op(loss, optimizer, 1)
            return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

        folder = tmp_path / wrap.__name__
        return train_in_micro_batches(model_fn, folder, _INPUT, "auto", max_steps=3)

    def as_it_is(layer):
        return layer

    assert difference(train_with(recompute), train_with(as_it_is)) <= 1e-7


def test_a_plan_with_something_else_in_it_is_named(make_machine, tmp_path):
    (tmp_path / "micro_batches.json").write_text('{"micro_batches": 2, "recompute": 1}')
    machine = make_machine(kept=2, recomputed=8)
    with pytest.raises(ValueError, match=r"micro_batches\.json must hold .*Received: "):
        machine.train(tmp_path)


def test_whether_layers_are_recomputed_is_a_summary(make_machine, tmp_path):
    (tmp_path / "micro_batches.json").write_text('{"micro_batches": 16}')
    make_machine(kept=0, recomputed=1).train(tmp_path, max_steps=1)
    scalars = read_scalars(tmp_path, "accumulation/recompute")
    assert [value for *_, value in scalars] == [0, 1]
