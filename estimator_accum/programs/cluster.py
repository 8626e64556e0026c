"""Training tasks: a `TF_CONFIG` cluster, a Slurm step, or one process alone.

    TF_CONFIG='{"cluster": {"chief": ["a:2222"], "worker": ["b:2222"]},
                "task": {"type": "worker", "index": 0}}'

The chief and the workers train; without a chief, worker 0 saves. An evaluator may be
listed in the cluster or not, and does not train.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

from estimator_accum.programs.json_text import parse_json
from estimator_accum.programs.launchers import check_known
from estimator_accum.programs.slurm import read_step

STRATEGIES = ("none", "mirrored", "multi_worker")  # values of `--strategy`

_TYPES = ("chief", "worker", "evaluator")


@dataclass(frozen=True)
class Cluster:
    """The tasks of a run, and the task that this process is.

    Attributes:
        chief: Address of the chief, host:port; None without a chief.
        workers: Addresses of the workers, host:port.
        has_evaluator: Whether the cluster is known to have an evaluator.
        task_type: "chief", "worker" or "evaluator".
        task_index: Index among the tasks of this type, >= 0.
    """

    chief: str | None = None
    workers: tuple[str, ...] = ()
    has_evaluator: bool = False
    task_type: str = "chief"
    task_index: int = 0

    @property
    def is_alone(self) -> bool:
        """Returns whether one process trains without a cluster."""
        return not self.chief and not self.workers

    @property
    def num_workers(self) -> int:
        """Number of tasks that train, the chief included."""
        return 1 if self.is_alone else len(self.workers) + bool(self.chief)

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
    def is_chief(self) -> bool:
        """Returns whether this task trains and saves."""
        return not self.is_evaluator and self.rank == 0

    @property
    def name(self) -> str:
        """Name of this task, such as "worker 0"; "alone" without a cluster."""
        return "alone" if self.is_alone else f"{self.task_type} {self.task_index}"

    def tf_config(self) -> str:
        """Returns the `TF_CONFIG` that Estimator and strategies read.

        Only the evaluator's own lists the evaluator: in the others, the sessions would
        wait for it.
        """
        cluster = {"worker": list(self.workers)} if self.workers else {}
        if self.chief:
            cluster["chief"] = [self.chief]
        if self.is_evaluator:
            cluster["evaluator"] = ["localhost:1"]  # no task connects to it
        task = {"type": self.task_type, "index": self.task_index}
        return json.dumps({"cluster": cluster, "task": task})


def read_cluster(environment: Mapping[str, str]) -> Cluster:
    """Returns the cluster that the environment describes; `TF_CONFIG` precedes Slurm.

    Args:
        environment: Environment variables, such as `os.environ`.

    Raises:
        ValueError: If it describes a cluster that cannot train, or another launcher
            started more processes; the message names the field or the variable.
    """
    if environment.get("TF_CONFIG"):
        return _from_tf_config(environment["TF_CONFIG"])
    if environment.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        check_known(environment)
        return Cluster()
    addresses, index = read_step(environment)
    check_known(environment, len(addresses))
    return Cluster(workers=tuple(addresses), task_type="worker", task_index=index)


def _from_tf_config(text: str) -> Cluster:
    try:
        config = parse_json(text)
    except ValueError as error:
        raise _error("", "JSON", f"{text[:80]} ({error})") from error
    if not isinstance(config, dict):
        raise _error("", "an object with cluster and task", _shown(config))
    jobs = _checked_jobs(config.get("cluster"))
    task_type, task_index = _checked_task(config.get("task"), jobs)
    return Cluster(
        jobs["chief"][0] if "chief" in jobs else None,
        tuple(jobs.get("worker", ())),
        "evaluator" in jobs or task_type == "evaluator",
        task_type,
        task_index,
    )


def _checked_jobs(jobs) -> dict[str, list[str]]:
    """Returns the addresses of each type of task, or raises ValueError."""
    if not isinstance(jobs, dict) or not jobs:
        raise _error('["cluster"]', "an object of task types", _shown(jobs))
    for job, addresses in jobs.items():
        if job not in _TYPES:
            remedy = (
                "Parameter servers have no place here: make them workers"
                if job == "ps"
                else "Name the task that saves chief, or leave it out"
            )
            allowed = "an object with only chief, worker and evaluator"
            raise _error('["cluster"]', allowed, job, remedy)
        where = f'["cluster"]["{job}"]'
        if not isinstance(addresses, list) or not addresses:
            raise _error(where, "a list of addresses", _shown(addresses))
        for address in addresses:
            if not _is_address(address):
                raise _error(where, "a list of host:port", _shown(address))
        if job != "worker" and len(addresses) > 1:
            raise _error(where, "one address", f"{len(addresses)} of them")
    everybody = [address for addresses in jobs.values() for address in addresses]
    twice = [address for address in everybody if everybody.count(address) > 1]
    if twice:
        raise _error(
            '["cluster"]', "of tasks with an address each", f"{twice[0]} twice"
        )
    if set(jobs) == {"evaluator"}:
        allowed = "an object with a chief or a worker, which train"
        raise _error('["cluster"]', allowed, "evaluator alone")
    return jobs


def _is_address(address) -> bool:
    if not isinstance(address, str):
        return False
    host, _, port = address.rpartition(":")
    is_clean = host and not any(c.isspace() or c in "/," for c in host)
    return bool(
        is_clean and port.isascii() and port.isdecimal() and 0 < int(port) < 2**16
    )


def _checked_task(task, jobs: dict[str, list[str]]) -> tuple[str, int]:
    """Returns (type, index) of this process, or raises ValueError."""
    if not isinstance(task, dict):
        raise _error('["task"]', "an object with type and index", _shown(task))
    task_type, index = task.get("type"), task.get("index")
    allowed = [job for job in _TYPES if job in jobs or job == "evaluator"]
    if task_type not in allowed:
        where = '["task"]["type"]'
        raise _error(where, f"one of {', '.join(allowed)}", _shown(task_type))
    # An evaluator need not be listed in the cluster.
    last = len(jobs.get(task_type, [None])) - 1
    if type(index) is not int or not 0 <= index <= last:
        allowed = f"an integer from 0 to {last} for a {task_type}" if last else "0"
        raise _error('["task"]["index"]', allowed, _shown(index))
    return task_type, index


def _shown(value) -> str:
    return "none" if value is None else json.dumps(value)[:80]


def _error(where: str, allowed: str, received: str, remedy: str = "") -> ValueError:
    remedy = remedy or "Correct it, or unset TF_CONFIG to train alone"
    return ValueError(
        f"`TF_CONFIG{where}` must be {allowed}. Received: {received}. {remedy}."
    )


def enter(cluster: Cluster) -> None:
    """Sets or removes `TF_CONFIG`, from which TensorFlow learns of the cluster."""
    if cluster.is_alone:
        os.environ.pop("TF_CONFIG", None)
    else:
        os.environ["TF_CONFIG"] = cluster.tf_config()


def read_cluster_of(strategy: str, environment: Mapping[str, str]) -> Cluster:
    """Returns the cluster in which this process trains, and evaluates at the end.

    Args:
        strategy: One of `STRATEGIES`; only "multi_worker" trains in a cluster.
        environment: Environment variables, such as `os.environ`.

    Raises:
        ValueError: If the environment describes a cluster that cannot train, this task
            is an evaluator, or `TF_CONFIG` has several training tasks without
            "multi_worker".
    """
    if strategy == "multi_worker":
        cluster = read_cluster(environment)
        if cluster.is_evaluator:
            raise ValueError(
                'The tasks of `TF_CONFIG["cluster"]` must train here: the first of them '
                "evaluates when training ends. Received: an evaluator. Leave it out."
            )
        return cluster if cluster.num_workers > 1 else Cluster()
    # Slurm is not read here: its tasks may be independent runs.
    if environment.get("TF_CONFIG"):
        cluster = read_cluster(environment)
        if cluster.num_workers > 1 or cluster.is_evaluator:
            raise ValueError(
                "`--strategy` must be multi_worker in a cluster, or its tasks would "
                f"train over one another. Received: {strategy} in a `TF_CONFIG` with "
                f"{cluster.num_workers} tasks that train. Use --strategy=multi_worker, "
                "or unset TF_CONFIG."
            )
    return Cluster()
