"""The nodes of a Slurm step, as its variables abbreviate them."""

import itertools
import re
from collections.abc import Mapping

_FIRST_PORT = 20000  # below the range of ephemeral ports
_NUM_PORTS = 10000
# 64 tasks of a step on a node have one block of ports. Jobs in a row share none; jobs 312
# apart do, and so do step 1 of a job and step 0 of the one 119 after it.
_FIRST_BLOCK, _NUM_BLOCKS, _BLOCK_PORTS = 12000, 312, 64
_BLOCKS_BETWEEN_STEPS = 119  # 0.382 of all: the first steps of a job lie far apart
_BLOCKS_BETWEEN_TASKS = 37  # of one step and node; eight blocks lie far from each other
_NAMES = (
    "SLURM_JOB_ID",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURMD_NODENAME",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_TASKS_PER_NODE",
)


def read_step(environment: Mapping[str, str]) -> tuple[list[str], int]:
    """Returns the addresses of a step's tasks, host:port, and this task's index.

    Hosts are in the order of their names, as in TensorFlow's `SlurmClusterResolver`.

    Raises:
        ValueError: If a variable is missing, or they contradict each other.
    """
    try:
        job, _, local_id, node, size, nodes, tasks = map(
            environment.__getitem__, _NAMES
        )
        if int(environment.get("SLURM_HET_SIZE") or 1) > 1:
            raise ValueError("SLURM_HET_SIZE of a job with several components")
        step = int(environment.get("SLURM_STEP_ID") or 0)
        block = int(job) + _BLOCKS_BETWEEN_STEPS * step
        counts = zip(expand_nodes(nodes), _expand_counts(tasks), strict=True)
        addresses = [
            f"{n}:{_port(block, i)}" for n, c in sorted(counts) for i in range(c)
        ]
        if len(addresses) != int(size):
            raise ValueError(f"{size} tasks, and {len(addresses)} on the nodes")
        return addresses, addresses.index(f"{node}:{_port(block, int(local_id))}")
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"Slurm must describe the step with {', '.join(_NAMES[:-1])} and "
            f"{_NAMES[-1]}. Received: {error}. Start the tasks with srun."
        ) from error


def _port(block: int, local_id: int) -> int:
    """Returns the port of a task, by its step's first block and its number on the node."""
    blocks, place = divmod(local_id, _BLOCK_PORTS)
    block = (block + _BLOCKS_BETWEEN_TASKS * blocks) % _NUM_BLOCKS
    return _FIRST_BLOCK + _BLOCK_PORTS * block + place


def first_port(job: int) -> int:
    """Returns the port of a job's first task on a machine, by any number of the job."""
    return _FIRST_PORT + job % _NUM_PORTS


def expand_nodes(text: str) -> list[str]:
    """Returns the names in a list of nodes, as `scontrol show hostnames` does.

        rack[1-2]n[08-09]-ib,login -> rack1n08-ib rack1n09-ib rack2n08-ib ... login

    Raises:
        ValueError: If it is no such list.
    """
    nodes = []
    for part in re.findall(r"(?:\[[^\]]*\]|[^,])+", text):
        pieces = re.split(r"\[([^\]]*)\]", part)  # every second one is of brackets
        if any(bracket in "".join(pieces) for bracket in "[]"):
            raise ValueError(f"{part} in SLURM_STEP_NODELIST")
        choices = [_numbers(p) if i % 2 else [p] for i, p in enumerate(pieces)]
        nodes += map("".join, itertools.product(*choices))
    return nodes


def _numbers(ranges: str) -> list[str]:
    """Returns the numbers of ranges: 8-10,12 and, with zeros in front, 08-10."""
    numbers = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        between = range(int(first), int(last or first) + 1)
        numbers += [f"{number:0{len(first)}}" for number in between]
    return numbers


def _expand_counts(text: str) -> list[int]:
    """Returns each node's number of tasks: 2(x3),1 are 2, 2, 2 and 1."""
    counts = []
    for part in text.split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * int(times.removesuffix(")") or 1)
    return counts
