"""Makes every optimizer of the process accumulate K `session.run` calls.

For training loops without an Estimator, which have no input_fn to split: the script feeds
or reads micro-batches by itself, and K of them make one update.

    tf.gradients, compute_gradients     their results are accumulated
    the script's changes of these       are made on the window's mean
    apply_gradients                     updates with every K-th call of session.run
    other writes of such a call         would happen K times per update: refused

Keras optimizers update by themselves with every call, and are refused.
"""

import contextlib
import functools
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator

import tensorflow as tf

from estimator_accum import AccumulatingOptimizer, get_windows
from estimator_accum.checks.before_runs import note_hooks
from estimator_accum.core.change import remember
from estimator_accum.graph.functions import functions_of
from estimator_accum.graph.internals import GRADIENTS, replace_function
from estimator_accum.graph.names import moves_generator
from estimator_accum.graph.variables import reads_of
from estimator_accum.graph.walks import ancestors, walk
from estimator_accum.graph.writers import needed_by_updates, writers_of
from estimator_accum.unedited.own_loops import watch_fetches

_logger = logging.getLogger("tensorflow.estimator_accum")


class _Local(threading.local):
    update = None  # (global_step,) while an update is being made
    is_computing = False  # gradients, by an optimizer


_local = _Local()


def accumulate_runs(gradient_accumulation_steps: int) -> Callable[[], int]:
    """Changes optimizers, gradients and sessions for the rest of the process.

    The `global_step` that the script passes to its optimizer counts updates, and so do
    its schedule and its last step.

    Args:
        gradient_accumulation_steps: K >= 1 [session.run calls per update].

    Returns:
        A function to call when the script has ended, that returns the exit code.
    """
    _logger.setLevel(logging.INFO)
    _logger.info(
        "accumulation: %d calls of session.run make one update; global_step counts "
        "updates. An update applies the mean of the calls' gradients: the gradient of a "
        "batch %d times as large, if the loss is a mean over examples. Changes to the "
        "gradients before apply_gradients, such as clipping, apply to the mean.",
        gradient_accumulation_steps,
        gradient_accumulation_steps,
    )
    if gradient_accumulation_steps == 1:
        return lambda: 0
    runs = Runs(gradient_accumulation_steps)
    runs.install()
    return runs.exit_code


def _say(sentence: str) -> None:
    print(f"estimator-accum: {sentence}", file=sys.stderr, flush=True)


def _change_methods(base: type, changes: dict[str, Callable]) -> None:
    """Replaces methods of a class and of its subclasses, also of later ones."""

    def change(kind: type) -> None:
        for name in changes.keys() & vars(kind).keys():
            setattr(kind, name, changes[name](vars(kind)[name]))

    for kind in walk([base], type.__subclasses__):
        if not issubclass(kind, AccumulatingOptimizer):
            change(kind)

    def init_subclass(cls, **options):
        super(base, cls).__init_subclass__(**options)
        change(cls)

    base.__init_subclass__ = classmethod(init_subclass)


@contextlib.contextmanager
def _outermost() -> Iterator[bool]:
    """Yields whether no other gradients are being computed.

    The outermost call knows best what gradients are: it may have scaled the loss.
    """
    is_outermost = not _local.is_computing
    _local.is_computing = True
    try:
        yield is_outermost and not tf.executing_eagerly()
    finally:
        _local.is_computing = not is_outermost


def _remembering(original: Callable) -> Callable:
    """Returns the stand-in for `compute_gradients` of an optimizer."""

    @functools.wraps(original)
    def compute_gradients(self, loss, *args, **kwargs):
        with _outermost() as is_outermost:
            pairs = original(self, loss, *args, **kwargs)
            if is_outermost:
                remember(pairs, loss)
        return pairs

    return compute_gradients


def _differentiating(original: Callable) -> Callable:
    """Returns the stand-in for TensorFlow's gradients."""

    def gradients(ys, xs, *args, **kwargs):
        with _outermost() as is_outermost:
            results = original(ys, xs, *args, **kwargs)
            if is_outermost:
                sources = xs if isinstance(xs, list | tuple) else [xs]
                pairs = zip(results, sources, strict=True)
                remember([p for p in pairs if isinstance(p[1], tf.Variable)], ys)
        return results

    return gradients


class Runs:
    """Accumulating train ops that stand in for those of optimizers, and their runs.

    Args:
        steps: K >= 1 [session.run calls per update].
    """

    def __init__(self, steps: int):
        self._steps = steps
        self._made = weakref.WeakKeyDictionary()  # operations of train ops, by graph
        self._train_ops = weakref.WeakKeyDictionary()  # these, by the outermost graph
        self._branches = set()  # names of branches with a train op
        self._seen = weakref.WeakKeyDictionary()  # fetches, by graph
        self._has_trained = self._is_refused = False

    def install(self) -> None:
        """Changes optimizers, gradients and sessions for the rest of the process."""
        methods = {
            "apply_gradients": self.accumulating,
            "compute_gradients": _remembering,
        }
        _change_methods(tf.compat.v1.train.Optimizer, methods)
        keras = tf.keras.optimizers
        older = getattr(keras, "legacy", keras)  # before TensorFlow 2.11 the only ones
        for kind in {keras.Optimizer, older.Optimizer}:
            _change_methods(kind, {"apply_gradients": self._refusing})
        replace_function(GRADIENTS, _differentiating)
        watch_fetches(self._check)

    def trains(self, fetched: Iterable[tf.Operation]) -> bool:
        """Returns whether a run of operations trains."""
        return any(map(self._is_train_op, ancestors(fetched)))

    def accumulating(self, original: Callable) -> Callable:
        """Returns the stand-in for `apply_gradients`."""

        @functools.wraps(original)
        def apply_gradients(
            optimizer, grads_and_vars, global_step=None, *args, **kwargs
        ):
            if _local.update is not None:  # this is the update
                global_step = _local.update[0]
                return original(optimizer, grads_and_vars, global_step, *args, **kwargs)
            graph = tf.compat.v1.get_default_graph()
            number = len(graph.get_operations())
            accumulating = AccumulatingOptimizer(optimizer, self._steps)
            _local.update = (global_step,)
            try:
                # An update waits for what the script reads of `global_step`.
                reads = [] if global_step is None else reads_of(global_step)
                with tf.control_dependencies(reads):
                    train_op = accumulating.apply_gradients(grads_and_vars)
            finally:
                _local.update = None
            self._made.setdefault(graph, set()).update(graph.get_operations()[number:])
            if graph.building_function:
                self._branches.add(graph.name)
            with tf.init_scope():
                graph = tf.compat.v1.get_default_graph()
            note_hooks(graph)  # the script has no place to pass them to
            self._train_ops.setdefault(graph, []).append(train_op)
            return train_op

        return apply_gradients

    def _refusing(self, original: Callable) -> Callable:
        """Returns the stand-in for `apply_gradients` of a Keras optimizer."""

        @functools.wraps(original)
        def apply_gradients(optimizer, *args, **kwargs):
            self._refuse(
                "With --gradient_accumulation_steps a script must train by optimizers "
                f"of tf.compat.v1.train. Received: {type(optimizer).__name__} of Keras. "
                "Wrap it in the script: estimator_accum.keras.accumulate(optimizer, K)."
            )

        return apply_gradients

    def _refuse(self, sentence: str) -> None:
        """Ends the process with a sentence and exit code 2."""
        _say(sentence)
        self._is_refused = True
        raise SystemExit(2)

    def exit_code(self) -> int:
        """Returns the exit code of a script that has ended by itself."""
        if code := self.refusal_code():
            return code
        if not self._has_trained:
            _say(
                "A script must train by optimizers of tf.compat.v1.train in session.run "
                "calls. Received: one that ended without such a call, so nothing was "
                "accumulated. Wrap its optimizer by this library, or train an Estimator "
                "with --micro_batches."
            )
        return int(not self._has_trained)

    def refusal_code(self) -> int:
        """Returns 2 if the script was refused in a thread of its own, else 0."""
        return 2 if self._is_refused else 0

    def _check(self, graph: tf.Graph, fetched: list[tf.Operation]) -> None:
        """Refuses a run that trains and writes to other variables, too."""
        seen = self._seen.setdefault(graph, set())
        key = (graph.version, *(operation.name for operation in fetched))
        if key in seen:
            return
        seen.add(key)
        needed = ancestors(fetched)
        train_ops = self._train_ops.get(graph, ())
        is_training = any(map(self._is_train_op, needed))
        if not is_training and not self._has_trained:
            return
        with graph.as_default():
            written, registered = self._written(needed), needed_by_updates(graph)
            windows = len(get_windows())
        if not is_training:
            if written:
                _logger.warning(
                    "accumulation: written by calls of session.run that do not train, "
                    "which do not count updates: %s",
                    ", ".join(sorted(written)),
                )
            return
        self._has_trained = True
        if windows > len(train_ops):
            self._refuse(
                "With --gradient_accumulation_steps a script must not accumulate by "
                "itself. Received: a train op of this library. Run the script by itself."
            )
        self._check_written(written, registered)

    def _check_written(self, written: dict, registered: dict) -> None:
        """Refuses writes beside the train op, but for those of `registered`."""
        for name, writer in written.items():
            if writer not in registered:
                self._refuse(
                    "With --gradient_accumulation_steps only optimizers and registered "
                    "UPDATE_OPS may write variables when the train op runs: any other "
                    f"write would run {self._steps} times per update. Received: {name}, "
                    f"written by {writer.name}. Leave it out, or wrap the optimizer in "
                    "the script: AccumulatingOptimizer(optimizer, K, after_update_ops=...)."
                )
        if written:
            _logger.warning(
                "accumulation: written with every call of session.run, not per update: %s",
                ", ".join(sorted(written)),
            )

    def _written(self, needed: dict) -> dict[str, tf.Operation]:
        """Returns the writers of the script's variables, by the variables' names."""
        local = {variable.op.name for variable in tf.compat.v1.local_variables()}
        variables = tf.compat.v1.global_variables()
        initializers = {variable.initializer for variable in variables}
        written = {}
        for variable, writers in writers_of(needed).items():
            for writer in writers:
                is_restored = any(t.op.type == "RestoreV2" for t in writer.inputs)
                is_known = writer in initializers or is_restored or self._is_own(writer)
                if not is_known and not moves_generator(writer.type):
                    written[variable.name] = writer
        return {name: w for name, w in written.items() if name not in local}

    def _is_own(self, operation: tf.Operation) -> bool:
        """Returns whether an operation is part of an accumulating train op."""
        return operation in self._made.get(operation.graph, ()) or self._is_branch(
            operation
        )

    def _is_train_op(self, operation: tf.Operation) -> bool:
        train_ops = self._train_ops.get(operation.graph, ())
        return operation in train_ops or self._is_branch(operation)

    def _is_branch(self, operation: tf.Operation) -> bool:
        """Returns whether an operation is a tf.cond in which there is a train op."""
        return bool(self._branches and self._branches & {*functions_of(operation)})
