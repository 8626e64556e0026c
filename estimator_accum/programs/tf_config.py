"""Clusters in JSON: `TF_CONFIG`, or Vertex AI's `CLUSTER_SPEC`.

TF_CONFIG='{"cluster": {"chief": ["a:2222"], "worker": ["b:2222"]},
            "task": {"type": "worker", "index": 0}}'
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from estimator_accum.programs.cluster import Cluster
from estimator_accum.programs.json_text import parse_json


@dataclass(frozen=True)
class Notation:
    """A variable with a cluster in JSON, and its words for the types of tasks.

    Attributes:
        variable: Name of the environment variable.
        types: "chief", "worker", "ps" or "evaluator" by the variable's word for it.
    """

    variable: str
    types: Mapping[str, str]

    def error(self, where: str, allowed: str, received, remedy: str = "") -> ValueError:
        remedy = remedy or f"Correct it, or unset {self.variable} to train alone"
        return ValueError(
            f"`{self.variable}{where}` must be {allowed}. Received: {received}. {remedy}."
        )


TF_CONFIG = Notation(
    "TF_CONFIG",
    {
        "chief": "chief",
        "master": "chief",  # as AI Platform and SageMaker name it
        "worker": "worker",
        "ps": "ps",
        "evaluator": "evaluator",
    },
)
CLUSTER_SPEC = Notation(
    "CLUSTER_SPEC",
    {
        "workerpool0": "chief",
        "workerpool1": "worker",
        "workerpool2": "ps",
        "workerpool3": "evaluator",
    },
)


def read_json(text: str, notation: Notation = TF_CONFIG) -> Cluster:
    """Returns the cluster that the text describes; without a cluster, a process alone.

    Raises:
        ValueError: If it describes a cluster that cannot train; the message names the
            field.
    """
    try:
        config = parse_json(text)
    except ValueError as error:
        raise notation.error("", "JSON", f"{text[:80]} ({error})") from error
    if not isinstance(config, dict):
        raise notation.error("", "an object with cluster and task", _shown(config))
    if "sparseCluster" in config:
        raise notation.error(
            '["sparseCluster"]',
            'replaced by "cluster", which lists all tasks',
            "a list of this task's connections",
            "Leave enableDynamicWorker out of the job",
        )
    if config.get("cluster", {}) == {} and _is_first(config.get("task", {}), notation):
        return Cluster()
    jobs = _checked_jobs(config.get("cluster"), notation)
    task_type, task_index = _checked_task(config.get("task"), jobs, notation)
    addresses = {notation.types[job]: listed for job, listed in jobs.items()}
    return Cluster(
        addresses["chief"][0] if "chief" in addresses else None,
        tuple(addresses.get("worker", ())),
        "evaluator" in addresses or task_type == "evaluator",
        task_type,
        task_index,
        tuple(addresses.get("ps", ())),
    )


def _is_first(task, notation: Notation) -> bool:
    """Returns whether a task is the first worker, which RunConfig has without a cluster."""
    if not isinstance(task, dict):
        return False
    task_type = notation.types.get(task.get("type", "worker"))
    return task_type == "worker" and task.get("index", 0) == 0


def _checked_jobs(jobs, notation: Notation) -> dict[str, list[str]]:
    """Returns the addresses of each type of task, or raises ValueError."""
    if isinstance(jobs, dict):  # operators list types without tasks as null or []
        jobs = {job: listed for job, listed in jobs.items() if listed not in (None, [])}
    if not isinstance(jobs, dict) or not jobs:
        allowed = "an object of task types and their addresses"
        raise notation.error('["cluster"]', allowed, _shown(jobs))
    for job, addresses in jobs.items():
        if job not in notation.types:
            allowed = f"an object with only {', '.join(notation.types)}"
            remedy = "Name the task that saves chief, or leave it out"
            raise notation.error('["cluster"]', allowed, job, remedy)
        where, is_single = f'["cluster"]["{job}"]', notation.types[job] in _SINGLE
        if not isinstance(addresses, list):
            raise notation.error(where, "a list of addresses", _shown(addresses))
        for address in addresses:
            if not _is_address(address):
                raise notation.error(where, "a list of host:port", _shown(address))
        if is_single and len(addresses) > 1:
            raise notation.error(where, "one address", f"{len(addresses)} of them")
    everybody = [address for addresses in jobs.values() for address in addresses]
    twice = [address for address in everybody if everybody.count(address) > 1]
    if twice:
        raise notation.error(
            '["cluster"]', "of tasks with an address each", f"{twice[0]} twice"
        )
    types = [notation.types[job] for job in jobs]
    if types.count("chief") > 1:
        raise notation.error('["cluster"]', "of one chief", "a chief and a master")
    if not {"chief", "worker"} & set(types):
        allowed = "an object with a chief or a worker, which train"
        raise notation.error('["cluster"]', allowed, f"{', '.join(jobs)} alone")
    return jobs


_SINGLE = ("chief", "evaluator")


def _is_address(address) -> bool:
    if not isinstance(address, str):
        return False
    host, _, port = address.rpartition(":")
    is_clean = host and not any(c.isspace() or c in "/," for c in host)
    return bool(
        is_clean and port.isascii() and port.isdecimal() and 0 < int(port) < 2**16
    )


def _checked_task(
    task, jobs: dict[str, list[str]], notation: Notation
) -> tuple[str, int]:
    """Returns (type, index) of this process, or raises ValueError."""
    if not isinstance(task, dict):
        raise notation.error('["task"]', "an object with type and index", _shown(task))
    job, index = task.get("type"), task.get("index")
    # An evaluator need not be listed in the cluster.
    types = notation.types
    allowed = [name for name in types if name in jobs or types[name] == "evaluator"]
    if job not in allowed:
        where = '["task"]["type"]'
        raise notation.error(where, f"one of {', '.join(allowed)}", _shown(job))
    last = len(jobs.get(job, [None])) - 1
    if type(index) is not int or not 0 <= index <= last:
        allowed = f"an integer from 0 to {last} for a {job}" if last else "0"
        raise notation.error('["task"]["index"]', allowed, _shown(index))
    return types[job], index


def _shown(value) -> str:
    return "none" if value is None else json.dumps(value)[:80]
