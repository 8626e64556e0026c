"""The window of one train op in a run: fetched, reported, applied if it is partial."""

import logging
import time

import tensorflow as tf

from estimator_accum.core.registry import Window
from estimator_accum.hooks._partial_window import PartialUpdate, as_vector
from estimator_accum.hooks._summary import TrainingSummary
from estimator_accum.reports import Report, Update
from estimator_accum.reports._progress import ProgressReport

_logger = logging.getLogger("tensorflow.estimator_accum")


class ReportedWindow:
    """The window of one train op in a run.

    Args:
        window: The window.
        reports: Its reports.
        learning_rate: Scalar Tensor to report; None reports none.

    Attributes:
        window: The window.
        fetched: Tensors that a session must fetch with every micro-step, for `take`.
    """

    def __init__(
        self, window: Window, reports: list[Report], learning_rate: tf.Tensor | None
    ):
        self.window, self._reports = window, reports
        for report in reports:
            report.check()
        # NaN if there is nothing to report.
        scalars = {
            "has_updated": window.has_updated,
            "loss": window.loss,
            "gradient_norm": window.gradient_norm,
            "weight": window.weight,
            "noise_scale": window.noise_scale,
        }
        if learning_rate is not None:
            scalars["learning_rate"] = learning_rate
        # Without another micro-step:
        update_step, clipped_share = window.of_partial
        of_partial = {"update_step": update_step, "clipped_share": clipped_share}
        self._partial = PartialUpdate(window, scalars | of_partial)
        scalars["is_boundary"] = window.is_boundary
        scalars["update_step"] = window.update_step_after
        scalars["clipped_share"] = window.clipped_share
        scalars["micro_batches"] = window.micro_steps_after * window.num_replicas
        if window.stop_request is not None:
            scalars["stop_requests"] = window.stop_requests
        if window.global_step_after is not None:
            scalars["global_step"] = window.global_step_after
        self._names = list(scalars)
        self.fetched = [as_vector(scalars), self._partial.needed]

    def runs_with(self, operations: dict) -> bool:
        """Returns whether a run of `operations` is a micro-step.

        Then they include the counters that every micro-step moves and nothing else does.
        """
        counters = [self.window.update_step_after, self.window.global_step_after]
        return all(
            counter.op in operations for counter in counters if counter is not None
        )

    def leave_to_chief(self) -> None:
        """Drops the reports of which a cluster needs only the chief's."""
        kinds = ProgressReport | TrainingSummary
        self._reports = [r for r in self._reports if isinstance(r, kinds)]

    def open(self, session: tf.compat.v1.Session) -> None:
        """Opens the reports in a new session."""
        update_step = int(session.run(self.window.update_step))
        for report in self._reports:
            report.open(update_step)
        self._reported_updates = update_step
        self._since = time.perf_counter()

    def count_from_here(self, session: tf.compat.v1.Session) -> None:
        """Takes the updates so far for reported."""
        if not self.window.place.is_on_worker:
            self._reported_updates = int(session.run(self.window.update_step))

    def take(self, values: list) -> dict[str, float]:
        """Returns the scalars by name, from the values of `fetched` in a micro-step."""
        scalars, for_partial = values
        self._partial.remember(for_partial)
        return dict(zip(self._names, scalars, strict=True))

    def report(self, values: dict[str, float], global_step: int) -> None:
        """Reports the update that `values`, scalars by name, are of."""
        now = time.perf_counter()
        values |= {"secs": now - self._since, "global_step": global_step}
        self._since = now
        self._reported_updates += 1
        update = Update(
            **{
                name: kind(values[name])
                for name, kind in Update.__annotations__.items()
                if name in values
            }
        )
        for report in self._reports:
            report.write(update)

    def unreported_updates(self, session: tf.compat.v1.Session) -> int:
        """Returns the updates of runs that hooks did not see, such as a hook's own."""
        if self.window.place.is_on_worker:  # other workers move update_step
            return 0
        return int(session.run(self.window.update_step)) - self._reported_updates

    def close(self) -> None:
        """Closes the reports."""
        for report in self._reports:
            report.close()

    def held(self, session: tf.compat.v1.Session) -> tuple[int, int]:
        """Returns the number of micro-steps in the open window, and K."""
        if self.window.micro_steps is None:
            return 0, 1
        counters = [self.window.micro_steps, self.window.gradient_accumulation_steps]
        held, steps = session.run(counters)
        return int(held), int(steps)

    def log_kept(self, session: tf.compat.v1.Session) -> tuple[int, int]:
        """Logs where the partial window stays; returns `held`."""
        held, steps = self.held(session)
        how = "kept in the checkpoint; the next train() resumes in mid-window."
        if self.window.place.is_on_worker:
            how = "lost: this worker has them, and no checkpoint."
        if held:
            _logger.info("%s %s", self._described(held, steps), how)
        return held, steps

    def apply_partial(self, session: tf.compat.v1.Session, global_step: int) -> bool:
        """Applies the partial window; returns whether there is one."""
        held, steps = self.held(session)
        if not held:
            return False
        described, result = self._described(held, steps), self._partial.run(session)
        if result is None:
            _logger.warning(
                "%s kept: the update reads values of a micro-batch.", described
            )
        elif not result["has_updated"]:
            _logger.info("%s dropped: their gradients are not finite.", described)
        else:
            _logger.info(
                "%s applied as update %d, divided by their own weight.",
                described,
                int(result["update_step"]),
            )
            result["micro_batches"] = held * self.window.num_replicas
            self.report(result, global_step)
        return True

    def _described(self, held: int, steps: int) -> str:
        return f"partial window of {self.window.name}: {held} of {steps} micro-steps"
