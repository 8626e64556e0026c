"""The tasks of a run, of which one is this process.

The chief and the workers train; without a chief, worker 0 saves. Parameter servers hold
the variables of a cluster that has them. An evaluator may be listed in the cluster or
not, and does not train.
"""

import json
import os
from dataclasses import dataclass, replace

EXIT_AGAIN = os.EX_TEMPFAIL  # 75: all tasks must be started again
STRATEGIES = ("none", "mirrored", "multi_worker", "parameter_server")


@dataclass(frozen=True)
class Cluster:
    """The tasks of a run, and the task that this process is.

    Attributes:
        chief: Address of the chief, host:port; None without a chief.
        workers: Addresses of the workers, host:port.
        has_evaluator: Whether the cluster is known to have an evaluator.
        task_type: "chief", "worker", "ps" or "evaluator".
        task_index: Index among the tasks of this type, >= 0.
        servers: Addresses of the parameter servers, host:port.
    """

    chief: str | None = None
    workers: tuple[str, ...] = ()
    has_evaluator: bool = False
    task_type: str = "chief"
    task_index: int = 0
    servers: tuple[str, ...] = ()

    @property
    def is_alone(self) -> bool:
        """Returns whether one process trains without a cluster."""
        return not self.chief and not self.workers

    @property
    def num_workers(self) -> int:
        """Number of tasks that train, the chief included."""
        return 1 if self.is_alone else len(self.workers) + bool(self.chief)

    @property
    def num_tasks(self) -> int:
        """Number of all tasks that the cluster is known to have."""
        return self.num_workers + len(self.servers) + self.has_evaluator

    @property
    def rank(self) -> int:
        """Index of this task among those that train, the chief first."""
        is_behind_chief = self.task_type == "worker" and self.chief is not None
        return self.task_index + is_behind_chief

    @property
    def is_evaluator(self) -> bool:
        """Returns whether this task evaluates and does not train."""
        return self.task_type == "evaluator"

    @property
    def is_server(self) -> bool:
        """Returns whether this task is a parameter server, which holds variables."""
        return self.task_type == "ps"

    @property
    def is_chief(self) -> bool:
        """Returns whether this task trains and saves."""
        return self.task_type in ("chief", "worker") and self.rank == 0

    @property
    def name(self) -> str:
        """Name of this task, such as "worker 0"; "alone" without a cluster."""
        return "alone" if self.is_alone else f"{self.task_type} {self.task_index}"

    @property
    def address(self) -> str | None:
        """Address at which the other tasks find this one; None without a cluster."""
        tasks = {"chief": (self.chief,), "worker": self.workers, "ps": self.servers}
        return None if self.is_evaluator else tasks[self.task_type][self.task_index]

    def turn(self, update: int) -> tuple[int, int]:
        """Returns (first, stride) of the updates whose examples this task reads.

        With parameter servers an update is one worker's, and the workers take turns.

        Args:
            update: Updates that are done.
        """
        return (update + self.rank, self.num_workers) if self.servers else (update, 1)

    def with_chief(self) -> "Cluster":
        """Returns the cluster with worker 0 as its chief, unless it has one."""
        if self.chief:
            return self
        task = {}
        if self.task_type == "worker" and self.task_index == 0:
            task = {"task_type": "chief"}
        elif self.task_type == "worker":
            task = {"task_index": self.task_index - 1}
        return replace(self, chief=self.workers[0], workers=self.workers[1:], **task)

    def tf_config(self) -> str:
        """Returns the `TF_CONFIG` that Estimator and strategies read.

        Only the evaluator's own lists the evaluator: in the others, the sessions would
        wait for it.
        """
        cluster = {"worker": list(self.workers)} if self.workers else {}
        if self.chief:
            cluster["chief"] = [self.chief]
        if self.servers:
            cluster["ps"] = list(self.servers)
        if self.is_evaluator:
            cluster["evaluator"] = ["localhost:1"]  # no task connects to it
        task = {"type": self.task_type, "index": self.task_index}
        return json.dumps({"cluster": cluster, "task": task})


def enter(cluster: Cluster) -> None:
    """Sets or removes `TF_CONFIG`, from which TensorFlow learns of the cluster."""
    if cluster.is_alone:
        os.environ.pop("TF_CONFIG", None)
    else:
        os.environ["TF_CONFIG"] = cluster.tf_config()
