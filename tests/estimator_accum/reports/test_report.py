"""Values of an update, in the order in which reports receive them."""

import math

import pytest
import tensorflow as tf

from estimator_accum import make_accumulating_train_op, make_accumulation_hooks
from estimator_accum.reports import CsvReport, Report, TensorBoardReport, Update
from tests.helpers.models.interfaces import sgd
from tests.helpers.models.summaries import read_scalars

v1 = tf.compat.v1


class _Heard(Report):
    """Keeps all reports."""

    def __init__(self):
        self.calls = []

    def check(self):
        self.calls.append("check")

    def open(self, update_step):
        self.calls.append(f"open {update_step}")

    def write(self, update):
        self.calls.append(update)

    def close(self):
        self.calls.append("close")


def _train(folder, hooks, micro_steps, num_train_ops=1):
    with tf.Graph().as_default():
        v1.train.get_or_create_global_step()
        x = v1.get_variable("x", initializer=1.0)
        train_ops = [
            make_accumulating_train_op(x * (index + 2.0), sgd(), 2)
            for index in range(num_train_ops)
        ]
        with v1.train.MonitoredTrainingSession(
            checkpoint_dir=str(folder), hooks=hooks(), save_checkpoint_secs=1000
        ) as session:
            for _ in range(micro_steps):
                session.run(train_ops)


def test_a_report_of_your_own_hears_of_each_update_and_where_training_resumes(
    tmp_path,
):
    heard = _Heard()
    for _ in range(2):
        _train(tmp_path, lambda: make_accumulation_hooks(reports=[heard]), 4)
    updates = [call for call in heard.calls if isinstance(call, Update)]
    said = [call for call in heard.calls if isinstance(call, str)]
    assert said == ["check", "open 0", "close", "check", "open 2", "close"]
    assert [(update.update_step, update.global_step) for update in updates] == [
        (1, 2),
        (2, 4),
        (3, 6),
        (4, 8),
    ]
    assert heard.calls[2:4] == updates[:2]
    for update in updates:
        assert (update.gradient_norm, update.weight, update.micro_batches) == (2, 2, 2)
        assert update.secs > 0
        assert update.weight_per_sec == update.weight / update.secs
    assert updates[0].loss == 2.0


def test_a_report_of_your_own_hears_only_of_the_first_train_op(tmp_path):
    heard = _Heard()
    _train(tmp_path, lambda: make_accumulation_hooks(reports=[heard]), 2, 2)
    (update,) = (call for call in heard.calls if isinstance(call, Update))
    assert update.gradient_norm == 2


def test_only_the_chief_tells_a_report_of_your_own(tmp_path, monkeypatch):
    extended = type(tf.distribute.get_strategy().extended)
    monkeypatch.setattr(extended, "should_save_summary", False)
    heard = _Heard()
    _train(tmp_path, lambda: make_accumulation_hooks(reports=[heard]), 2)
    assert heard.calls == []


def test_what_a_check_finds_ends_training_before_it_begins(tmp_path):
    class Refusing(_Heard):
        def check(self):
            raise ValueError("not there")

    report = Refusing()
    with pytest.raises(ValueError, match="^not there$"):
        _train(tmp_path, lambda: make_accumulation_hooks(reports=[report]), 2)
    assert report.calls == [] and not list(tmp_path.glob("*ckpt*"))


def _scalars(folder):
    return {
        (tag.split("/")[1], step): value
        for tag, step, value in read_scalars(folder, "accumulation/")
    }


def test_a_metrics_dir_is_both_reports_in_that_folder(tmp_path):
    both, parts = tmp_path / "both", tmp_path / "parts"
    _train(tmp_path / "a", lambda: make_accumulation_hooks(metrics_dir=both), 4)
    reports = [CsvReport(parts), TensorBoardReport(parts)]
    _train(tmp_path / "b", lambda: make_accumulation_hooks(reports=reports), 4)
    kinds = [sorted(path.name[:8] for path in f.iterdir()) for f in (both, parts)]
    assert kinds[0] == kinds[1] == ["events.o", "train_me"]

    def without_speed(folder):
        rows = (folder / "train_metrics.csv").read_text().splitlines()
        scalars = {k: v for k, v in _scalars(folder).items() if "per_sec" not in k[0]}
        return [row.rpartition(",")[0] for row in rows], scalars

    assert without_speed(both) == without_speed(parts)
    scalars = _scalars(both)
    assert scalars["micro_steps", 2] == 4 and scalars["global_step", 2] == 4


def test_tensorboard_alone_counts_from_the_start_and_beside_a_table_from_its_end(
    tmp_path,
):
    update = Update(3, 12, loss=0.5, gradient_norm=1.0, weight=4.0)
    for table in (None, CsvReport(tmp_path)):
        if table is not None:
            table.open(0)
            table.write(update._replace(update_step=2))
        with tf.Graph().as_default():
            report = TensorBoardReport(tmp_path)
            report.open(2)
            report.write(update._replace(update_step=3 + bool(table)))
            report.close()
    scalars = _scalars(tmp_path)
    assert (scalars["micro_steps", 3], scalars["micro_steps", 4]) == (4, 8)
    assert ("micro_steps_per_sec", 3) not in scalars


def test_what_is_unknown_is_no_value():
    update = Update(1, 2, loss=0.5, gradient_norm=math.nan, weight=4.0)
    assert update.known_values() == {
        "update_step": 1,
        "global_step": 2,
        "loss": 0.5,
        "weight": 4.0,
        "micro_batches": 1,
        "clipped_share": 0.0,
    }
    values = update._replace(secs=8.0, learning_rate=0.1).known_values()
    assert (values["weight_per_sec"], values["learning_rate"]) == (0.5, 0.1)


@pytest.mark.parametrize(
    ("reports", "received"),
    [
        (_Heard(), "<.*_Heard object at .*>"),
        ([CsvReport], "<class '.*CsvReport'> in the list"),
        ([_Heard(), print], "<built-in function print> in the list"),
        (None, "None"),
    ],
)
def test_reports_that_are_none_are_refused_in_one_sentence(reports, received):
    rule = "`reports` must be a list of objects with the methods check, open, write and"
    with pytest.raises(TypeError, match=f"^{rule} close. Received: {received}. Make "):
        make_accumulation_hooks(reports=reports)


def test_an_object_with_the_four_methods_needs_no_base_class():
    def nothing(*arguments):
        return None

    methods = dict.fromkeys(("check", "open", "write", "close"), nothing)
    make_accumulation_hooks(reports=[type("Quiet", (), methods)()])
