"""Saver integration: warm starts, checkpoints without accumulators, the final save.

`State` (`core/state.py`) says what a checkpoint in mid-window contains. The Saver's own
interface does not cover three cases:

* a warm start must not change accumulators;
* a checkpoint of a graph without accumulation has no accumulators, and must still
  restore, with an empty window;
* a partial window that is applied when training ends must be applied *before* the
  final save, which TensorFlow's CheckpointSaverHook makes before later hooks' `end`.
"""

import logging
from collections.abc import Callable

import tensorflow as tf

from estimator_accum.core.registry import Window
from estimator_accum.graph.internals import is_in_cluster, saveables_of, set_initializer
from estimator_accum.graph.variables import INITIALIZER_ATTRIBUTE

_logger = logging.getLogger("tensorflow.estimator_accum")


def get_or_add_saver() -> tf.compat.v1.train.Saver:
    """Returns the Saver that a MonitoredTrainingSession of this graph will use.

    A Saver that a user's own `Scaffold` holds is in no collection and is not found.
    """
    savers = tf.compat.v1.get_collection_ref(tf.compat.v1.GraphKeys.SAVERS)
    if not savers:
        # The same Saver that Scaffold makes by default, after the hooks' begin().
        savers.append(
            tf.compat.v1.train.Saver(sharded=True, allow_empty=True, defer_build=True)
        )
    return savers[0]


def keep_initial_values(windows: list[Window]) -> None:
    """Undoes a warm start of the accumulation state, which starts empty as usual.

    `WarmStartSettings` with a list of patterns matches all global variables, and so
    these too.
    """
    for window in windows:
        for variable in window.variables:
            initializer = getattr(variable, INITIALIZER_ATTRIBUTE, None)
            if initializer is not None:
                set_initializer(variable, initializer)


class SaveWatch:
    """Calls a function before every save of `saver`, and can repeat the latest saves.

    Args:
        saver: The Saver to watch.
        before_save: Called with the session; returns its global_step.

    Attributes:
        after_next_save: Function to call once after the next save; None calls none.
    """

    def __init__(
        self,
        saver: tf.compat.v1.train.Saver,
        before_save: Callable[[tf.compat.v1.Session], int],
    ):
        self._save = saver.save
        self._latest = {}
        self.after_next_save = None

        def save(sess, save_path, *args, **kwargs):
            self._latest[save_path] = before_save(sess), args, kwargs
            path = self._save(sess, save_path, *args, **kwargs)
            if self.after_next_save is not None:
                self.after_next_save()
                self.after_next_save = None
            return path

        saver.save = save

    @property
    def has_saved(self) -> bool:
        """True once anything was saved."""
        return bool(self._latest)

    def has_saved_at(self, global_step: int) -> bool:
        """Returns whether the latest save of some path was at this global_step.

        With parameter servers it is one of this task's, and a save may be behind it.
        """
        return any(step >= global_step for step, *_ in self._latest.values())

    def save_again(self, session: tf.compat.v1.Session, global_step: int) -> None:
        """Repeats the saves of `global_step` with the session's current values."""
        for save_path, (saved_step, args, kwargs) in self._latest.items():
            if saved_step >= global_step:
                self._save(session, save_path, *args, **kwargs)


def check_is_saved(watch: SaveWatch) -> None:
    """Raises ValueError if a cluster would train without writing any checkpoint.

    TensorFlow makes MultiWorkerMirroredStrategy's CheckpointSaverHook, which saves as
    soon as there is a session, only if it makes a SummarySaverHook too.

    Raises:
        ValueError: Before the first micro-step, if no checkpoint has been written.
    """
    is_cluster = is_in_cluster(tf.distribute.get_strategy())
    if is_cluster and not watch.has_saved:
        raise ValueError(
            "Under MultiWorkerMirroredStrategy training must write checkpoints. "
            "Received: none when it began, as with a RunConfig whose "
            "save_summary_steps is 0 or None. Make it and save_checkpoints_steps >= 1; "
            "pass the Saver of your own Scaffold to make_accumulation_hooks."
        )


class WindowlessRestore:
    """Lets `saver` restore checkpoints that lack accumulation state.

    `update_step` of each train op then continues from the checkpoint's own. If the
    checkpoint has none, all continue from its `global_step`: without accumulation every
    micro-step was an update. The window starts empty. Statistics that the checkpoint
    lacks start at 0. So does an empty window whose sums the checkpoint has in another
    dtype.

    Args:
        saver: The Saver to change.
        windows: The graph's accumulating train ops.
    """

    def __init__(self, saver: tf.compat.v1.train.Saver, windows: list[Window]):
        self._restore, self._saver = saver.restore, saver
        state = _by_name(v for window in windows for v in window.saved)
        # All but the counters, which hold nothing while a window is empty.
        self._sums = {n: v for n, v in state.items() if v.dtype.is_floating}
        statistics = _by_name(v for window in windows for v in window.statistics)
        self._state_names = state.keys()
        self._ours = [*state.values(), *statistics.values()]
        self._initialize = tf.compat.v1.variables_initializer(self._ours)
        # Made now: the graph is finalized before the checkpoint is known.
        update_steps = _by_name(window.update_step for window in windows)
        self._update_steps = update_steps.keys()
        self._scalars = {
            name: _assigner(variable)
            for name, variable in (update_steps | statistics).items()
        }
        with tf.compat.v1.name_scope(None):
            self._window = _saver(list(state.values()), "restore_accumulation")
        self._others, self._build = None, saver.build
        saver.build, saver.restore = self.build, self.restore

    def build(self) -> None:
        """Builds the Saver, and the one of variables that hooks may have made since."""
        self._build()
        if self._others is None:
            with tf.compat.v1.name_scope(None):
                others = _without(_saved_by(self._saver), self._ours)
                self._others = _saver(others, "restore_without_accumulation")

    def restore(self, sess: tf.compat.v1.Session, save_path: str) -> None:
        """Restores `save_path`, with or without accumulation state."""
        reader = tf.compat.v1.train.NewCheckpointReader(save_path)
        names = set(reader.get_variable_to_shape_map())
        _warn_of_lost_window(reader, names, self._state_names)
        has_same_sums = self._has_same_sums(reader, names)
        if has_same_sums and self._state_names | self._scalars.keys() <= names:
            self._restore(sess, save_path)
            return
        if self._others is None:
            self.build()
        self._others.restore(sess, save_path)
        sess.run(self._initialize)
        for name in self._scalars.keys() & names:
            self._scalars[name](sess, reader.get_tensor(name))
        if self._state_names <= names:
            if has_same_sums:  # else the window is empty
                self._window.restore(sess, save_path)
            return
        origin = "continues from the checkpoint's own"
        if self._update_steps.isdisjoint(names):
            origin = "starts at 0"
            if "global_step" in names:
                origin = "continues from the checkpoint's global_step"
                for name in self._update_steps:
                    self._scalars[name](sess, reader.get_tensor("global_step"))
        _logger.info(
            "%s has no accumulators for this graph: its window starts empty, and "
            "update_step %s.",
            save_path,
            origin,
        )

    def _has_same_sums(self, reader, names: set[str]) -> bool:
        """Returns whether sums have the checkpoint's dtypes; refuses an open window."""
        dtypes = reader.get_variable_to_dtype_map()
        changed = [
            (name, dtypes[name].name, variable.dtype.base_dtype.name)
            for name, variable in self._sums.items()
            if name in names and dtypes[name] != variable.dtype.base_dtype
        ]
        counters = [n for n in self._state_names & names if n.endswith("/micro_steps")]
        if changed and any(reader.get_tensor(counter) for counter in counters):
            name, before, now = changed[0]
            raise ValueError(
                "An open window must be resumed with the dtypes of its sums. Received: "
                f"{name} of {before} in the checkpoint, and of {now} here. Restart with "
                f"accumulator_dtype=tf.{before} until the window has closed."
            )
        return not changed


def _assigner(variable: tf.Variable) -> Callable:
    """Returns a function of a session and the value that it gives a scalar variable."""
    value = tf.compat.v1.placeholder(variable.dtype.base_dtype, [])
    assign = tf.compat.v1.assign(variable, value)
    return lambda session, number: session.run(assign, {value: number})


def _saver(variables: list | dict, name: str) -> tf.compat.v1.train.Saver:
    return tf.compat.v1.train.Saver(variables, allow_empty=True, name=name)


def _by_name(variables) -> dict[str, tf.Variable]:
    return {variable.op.name: variable for variable in variables}


def _saved_by(saver: tf.compat.v1.train.Saver) -> list | dict:
    """Returns the Saver's variables: a list, a dict by name, or the graph's default."""
    saveables = saveables_of(saver)
    if saveables is not None:
        return saveables
    return [
        *tf.compat.v1.global_variables(),
        *tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.SAVEABLE_OBJECTS),
    ]


def _without(saveables: list | dict, ours: list[tf.Variable]) -> list | dict:
    ours = set(map(id, ours))  # variables compare elementwise
    if isinstance(saveables, dict):
        return {name: v for name, v in saveables.items() if id(v) not in ours}
    return [variable for variable in saveables if id(variable) not in ours]


def _warn_of_lost_window(reader, names: set[str], state_names: set[str]) -> None:
    """Warns if this graph cannot continue the checkpoint's partial window."""
    for name in names:
        scope, _, what = name.rpartition("/")
        if what != "micro_steps" or f"{scope}/weight" not in names:
            continue
        open_steps = int(reader.get_tensor(name))
        if open_steps and not (name in state_names and state_names <= names):
            _logger.warning(
                "The checkpoint holds a partial window of %d micro-steps, which this "
                "graph cannot continue: it is dropped. Restart with the settings "
                "that wrote it to keep it.",
                open_steps,
            )
