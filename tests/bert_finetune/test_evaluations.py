"""evaluations.csv, the best checkpoint, early stops: without a model."""

import dataclasses
import os
import pathlib
import signal

import pytest
import tensorflow as tf

from bert_finetune import training
from bert_finetune.evaluations import (
    Evaluations,
    best_checkpoint,
    check_evaluations,
    read_evaluations,
)
from bert_finetune.windows import make_windows
from estimator_accum.programs.batches import Batches
from estimator_accum.programs.cluster import Cluster
from estimator_accum.programs.progress import Progress

pytestmark = pytest.mark.once
_METRIC = "f1"


class _Folder:
    """An output folder whose checkpoints hold one number, their metric."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        path.mkdir()
        (path / "run_settings.json").write_text("{}")

    def save(self, step: int, metric: float) -> None:
        for end in ("data-00000-of-00001", "index", "meta"):
            new = self.path / "new"
            new.write_text(f"{metric}")
            new.replace(self.path / f"model.ckpt-{step}.{end}")
        (self.path / "checkpoint").write_text(
            f'model_checkpoint_path: "model.ckpt-{step}"\n'
        )

    @staticmethod
    def measure(checkpoint: str) -> dict[str, float]:
        content = _content(pathlib.Path(checkpoint))
        return {"eval_accuracy": 0.5, _METRIC: content}

    def evaluations(self, **options) -> Evaluations:
        options = {"every": 1, "num_updates": 100} | options
        return Evaluations(self.path, _METRIC, self.measure, **options)

    def add(self, evaluations: Evaluations, update: int, metric: float) -> None:
        self.save(10 * update, metric)
        evaluations.add(Progress(10 * update, update, 0))

    @property
    def rows(self) -> dict[int, float]:
        rows = read_evaluations(self.path, _METRIC)
        return {int(row["update_step"]): float(row[_METRIC]) for row in rows}

    @property
    def best(self) -> tuple[str, float]:
        """Name and metric of the best checkpoint, which is all that `best/` has."""
        path = best_checkpoint(self.path)
        names = {"checkpoint", "run_settings.json"}
        names |= {f"{path.name}.{end}" for end in ("index", "data-00000-of-00001")}
        assert {file.name for file in path.parent.iterdir()} == names
        return path.name, _content(path)


def _content(checkpoint: pathlib.Path) -> float:
    """Returns the number that all parts of a checkpoint hold."""
    ends = (".index", ".data-00000-of-00001")
    [number] = {checkpoint.with_name(checkpoint.name + e).read_text() for e in ends}
    return float(number)


@pytest.fixture
def folder(tmp_path) -> _Folder:
    return _Folder(tmp_path / "output")


def test_best_checkpoint_is_the_first_of_the_largest_metric(folder):
    evaluations = folder.evaluations()
    evaluations.open(0)
    expected = [(1, -0.5, 1), (2, 0.25, 2), (3, 0.25, 2), (4, 0.75, 4), (5, 0.5, 4)]
    for update, metric, best in expected:
        folder.add(evaluations, update, metric)
        assert folder.best[0] == f"model.ckpt-{10 * best}"
    assert folder.rows == {update: metric for update, metric, _ in expected}
    text = (folder.path / "evaluations.csv").read_text().splitlines()
    assert text[:2] == ["update_step,global_step,eval_accuracy,f1", "1,10,0.5,-0.5"]


@pytest.mark.parametrize("patience, stops_after", [(1, 3), (2, 6), (4, None)])
def test_training_stops_after_evaluations_in_a_row_without_a_better_one(
    patience, stops_after, folder
):
    metrics = [0.1, 0.2, 0.2, 0.3, 0.1, 0.3]
    evaluations = folder.evaluations(patience=patience)
    evaluations.open(0)
    stops = []
    for update, metric in enumerate(metrics, 1):
        folder.add(evaluations, update, metric)
        again = folder.evaluations(patience=patience)
        again.open(update)
        assert again.has_stopped == evaluations.has_stopped
        stops += [update] * evaluations.has_stopped
    assert stops[:1] == ([] if stops_after is None else [stops_after])


def test_every_nth_update_and_the_last_one_are_evaluated(folder):
    evaluations = folder.evaluations(every=4, num_updates=10)
    evaluations.open(0)
    assert [evaluations.next_update(n) for n in (0, 3, 4, 8)] == [4, 4, 8, 10]
    missing = [update for update in range(11) if evaluations.is_missing(update)]
    assert missing == [4, 8, 10]
    folder.add(evaluations, 4, 0.5)
    assert not evaluations.is_missing(4)


class _Killed(BaseException):
    pass


def _killed_after(count: int, patch: pytest.MonkeyPatch) -> None:
    """Makes every change of the disk fail from the one of this number on."""
    left = [count]

    def failing(change):
        def changed(*args, **options):
            if left[0] <= 0:
                raise _Killed
            left[0] -= 1
            return change(*args, **options)

        return changed

    for owner, name in (
        (os, "link"),
        (pathlib.Path, "replace"),
        (pathlib.Path, "unlink"),
        (pathlib.Path, "mkdir"),
        (pathlib.Path, "write_text"),
    ):
        patch.setattr(owner, name, failing(getattr(owner, name)))


@pytest.mark.parametrize("metric", [0.75, 0.25])
def test_run_killed_between_two_writes_of_an_evaluation_resumes_as_if_it_was_not(
    metric, tmp_path
):
    count, is_killed = 0, True
    while is_killed:
        folder = _Folder(tmp_path / f"{count}")
        evaluations = folder.evaluations()
        evaluations.open(0)
        folder.add(evaluations, 1, 0.5)
        folder.save(20, metric)
        with pytest.MonkeyPatch.context() as patch:
            _killed_after(count, patch)
            try:
                evaluations.add(Progress(20, 2, 0))
                is_killed = False
            except _Killed:
                pass
        assert _content(best_checkpoint(folder.path)) >= max(folder.rows.values())
        again = folder.evaluations()
        again.open(2)
        if again.is_missing(2):
            again.add(Progress(20, 2, 0))
        assert folder.rows == {1: 0.5, 2: metric}
        assert folder.best[1] == max(metric, 0.5)
        count += 1
    assert count > (8 if metric > 0.5 else 2)  # at least as many writes were tried


def test_rows_after_the_restored_update_are_dropped_and_the_best_stays_whole(folder):
    """The checkpoint of update 3 is back, with rounding of another device."""
    evaluations = folder.evaluations()
    evaluations.open(0)
    for update, metric in enumerate((0.5, 0.25, 0.75), 1):
        folder.add(evaluations, update, metric)
    again = folder.evaluations()
    again.open(2)
    assert folder.rows == {1: 0.5, 2: 0.25}
    assert folder.best == ("model.ckpt-30", 0.75)
    folder.add(again, 3, 0.625)
    assert folder.rows == {1: 0.5, 2: 0.25, 3: 0.625}
    assert folder.best == ("model.ckpt-30-again", 0.625)
    folder.add(again, 4, 0.875)
    assert folder.best == ("model.ckpt-40", 0.875)


def test_without_hard_links_the_best_checkpoint_is_a_copy(folder, monkeypatch):
    def refused(*_):
        raise PermissionError

    monkeypatch.setattr(os, "link", refused)
    evaluations = folder.evaluations()
    evaluations.open(0)
    folder.add(evaluations, 1, 0.5)
    assert folder.best == ("model.ckpt-10", 0.5)


@pytest.mark.parametrize(
    "text, received",
    [
        ("update_step,global_step\n1,2\n", "update_step, global_step"),
        ("update_step,global_step,f1\n1,2\n", "float"),
        ("update_step,global_step,f1\n1,2,3,4\n", "None"),
        ("update_step,global_step,f1\nx,2,3\n", "invalid literal"),
        ("f1\n0.5\n", "'update_step'"),
    ],
)
def test_damaged_table_is_refused(text, received, folder):
    (folder.path / "evaluations.csv").write_text(text)
    with pytest.raises(
        ValueError, match=f"with the columns .*f1. Received: .*{received}"
    ):
        check_evaluations(folder.path, _METRIC)


def test_table_without_its_best_checkpoint_is_refused(folder):
    check_evaluations(folder.path, _METRIC)
    (folder.path / "evaluations.csv").write_text("update_step,global_step,f1\n1,2,3\n")
    with pytest.raises(
        ValueError, match="where best/ names none. Remove evaluations.c"
    ):
        check_evaluations(folder.path, _METRIC)


class _World:
    """Training and its checkpoints, with an Estimator that only counts."""

    def __init__(self, folder: _Folder, windows, monkeypatch, settings):
        self.folder, self.windows = folder, windows
        self.progress, self.max_steps = Progress(0, 0, 0), []
        names = [field.name for field in dataclasses.fields(training.Run)]
        parts = dict.fromkeys(names) | {"settings": settings, "cluster": Cluster()}
        parts |= {"description": {}, "windows": windows, "hooks": ()}
        self.run = training.Run(**parts)
        monkeypatch.setattr(training, "make_estimator", lambda *_: self)
        monkeypatch.setattr(training, "read_progress", lambda _: self.progress)
        monkeypatch.setattr(training, "train_input_fn", lambda *_, **__: None)

    def train(self, input_fn, hooks, max_steps):
        """Trains to `max_steps`, which must be the end of an update."""
        self.max_steps.append(max_steps)
        total = self.windows.num_micro_steps()
        step = total if max_steps is None else max_steps
        left = [
            self.windows.num_micro_steps(n) for n in range(self.windows.num_updates + 1)
        ]
        self.progress = Progress(step, left.index(total - step), 0)
        self.folder.save(step, 1 / step)

    def evaluations(self, measure=_Folder.measure, **options) -> Evaluations:
        options |= {"num_updates": self.windows.num_updates}
        return Evaluations(self.folder.path, _METRIC, measure, **options)


@pytest.fixture
def make_world(folder, monkeypatch, settings):
    def make(batches=None, **options) -> _World:
        windows = make_windows(18, 1.0, batches or Batches(4, 2, 1), 0, **options)
        ours = dataclasses.replace(settings, output_dir=str(folder.path))
        return _World(folder, windows, monkeypatch, ours)

    return make


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, [4, 8, None]),  # micro-steps of updates: 2, 2, 2, 2, 1
        ({"batches": Batches(4, 1, 1, is_auto=True)}, [2, 4, None]),
        ({"lengths": [1] * 18, "tokens": 2}, [4, 8, None]),
        ({"lengths": range(18), "tokens": 17}, [6, 9, None]),
    ],
)
def test_training_pauses_at_the_ends_of_updates(options, expected, make_world):
    if "lengths" in options:
        options["lengths"] = tf.constant(options["lengths"]).numpy()
    world = make_world(**options)
    assert training.train(world.run, world.evaluations(every=2))
    assert world.folder.rows.keys() == {2, 4, 5}
    if options.get("tokens") != 17:
        assert world.max_steps == expected
    else:
        steps = world.windows.micro_steps_by_update
        assert len(set(steps)) > 1
        assert world.max_steps == [steps[:2].sum(), steps[:4].sum(), None]


def test_run_that_stopped_early_says_so_when_it_is_started_again(make_world, caplog):
    world = make_world()
    caplog.set_level("INFO", "tensorflow.bert_finetune")
    early = {"every": 1, "patience": 1}
    assert training.train(world.run, world.evaluations(**early))
    assert "stopped early at update 2" in caplog.text
    assert not training.train(world.run, world.evaluations(**early))
    assert "is trained already, stopped early at update 2" in caplog.text
    assert world.max_steps == [2, 4]
    assert training.train(world.run, world.evaluations(every=1))  # more patience
    assert world.folder.rows.keys() == {1, 2, 3, 4, 5}


def test_evaluation_that_was_killed_is_made_before_training_goes_on(make_world):
    world = make_world()

    def killed(checkpoint):
        raise _Killed

    with pytest.raises(_Killed):
        training.train(world.run, world.evaluations(killed, every=2))
    assert world.max_steps == [4] and world.folder.rows == {}
    seen = []

    def measure(checkpoint):
        seen.append(pathlib.Path(checkpoint).name)
        return _Folder.measure(checkpoint)

    training.train(world.run, world.evaluations(measure, every=2))
    assert seen == ["model.ckpt-4", "model.ckpt-8", "model.ckpt-9"]


@pytest.mark.parametrize("name, code", [("SIGTERM", 143), ("SIGUSR1", 75)])
def test_signal_during_an_evaluation_ends_the_run(name, code, make_world, caplog):
    world = make_world()
    number = signal.Signals[name]
    before = signal.signal(number, lambda *_: None)

    def measure(checkpoint):
        os.kill(os.getpid(), number)
        return _Folder.measure(checkpoint)

    try:
        with pytest.raises(SystemExit) as stopped:
            training.train(world.run, world.evaluations(measure, every=2))
        assert signal.getsignal(number) not in (signal.SIG_DFL, None)
    finally:
        handler = signal.signal(number, before)
    assert handler.__name__ == "<lambda>"  # the handlers are back
    assert stopped.value.code == code
    assert f"{name}: the same command resumes from the last check" in caplog.text
    assert world.folder.rows == {}
