"""Environment variables of launchers that start processes without a `TF_CONFIG`.

    mpirun -n 2 python -m distributed.main      OMPI_COMM_WORLD_SIZE=2

Each of these processes would train alone, and all of them into one folder.
"""

import re
from collections.abc import Mapping

from estimator_accum.programs.json_text import parse_json

_SIZES = {  # numbers of processes, or of nodes
    "Open MPI": ("OMPI_COMM_WORLD_SIZE",),
    "MPICH or Intel MPI": ("PMI_SIZE", "MPI_LOCALNRANKS"),
    "MVAPICH": ("MV2_COMM_WORLD_SIZE",),
    "jsrun": ("JSM_NAMESPACE_SIZE",),
    "torchrun": ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "PET_NNODES"),
    "horovodrun": ("HOROVOD_SIZE",),
    "Slurm": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "AWS Batch": ("AWS_BATCH_JOB_NUM_NODES",),
    "Azure ML": ("AZUREML_NODE_COUNT",),
}
_RANKS = {  # this process's number, from 0
    "Open MPI": ("OMPI_COMM_WORLD_RANK",),
    "PMI or PMIx": ("PMI_RANK", "PMIX_RANK"),
    "MVAPICH": ("MV2_COMM_WORLD_RANK",),
    "jsrun": ("JSM_NAMESPACE_RANK",),
    "torchrun": ("RANK", "GROUP_RANK", "PET_NODE_RANK"),
    "horovodrun": ("HOROVOD_RANK",),
    "Slurm": ("SLURM_PROCID",),
    "AWS Batch": ("AWS_BATCH_JOB_NODE_INDEX",),
}
_LISTS = {  # hosts, or the addresses of each kind of task, in JSON
    "SageMaker": ("SM_HOSTS", "SM_RESOURCE_CONFIG"),
    "Vertex AI": ("CLUSTER_SPEC",),
}


def check_known(environment: Mapping[str, str], num_tasks: int = 1) -> None:
    """Raises ValueError if a launcher's variables prove more processes than are known.

    Args:
        environment: Environment variables, such as `os.environ`.
        num_tasks: Number of processes in the cluster that this one knows, >= 1.
    """
    for table, least in (
        (_SIZES, _last_number),
        (_RANKS, lambda text: _last_number(text) + 1),
        (_LISTS, _count_hosts),
    ):
        for launcher, names in table.items():
            if launcher == "Slurm" and "SLURM_STEP_NUM_TASKS" in environment:
                continue  # a step may have fewer tasks than its job
            for name in names:
                if least(environment.get(name, "")) > num_tasks:
                    raise ValueError(
                        "A cluster must be described by `TF_CONFIG` or by a Slurm step. "
                        f"Received: {name}={environment[name][:80]} of {launcher}, "
                        "whose processes would train alone, into one folder. Start "
                        "them with srun or `estimator-accum launch`, set TF_CONFIG in "
                        f"each of them, or unset {name} to train alone."
                    )


def _last_number(text: str) -> int:
    """Returns the number, of a range such as "1:4" its end; 0 if there is none."""
    match = re.fullmatch(r"\s*(?:\d+:)?(\d{1,9})\s*", text)
    return int(match[1]) if match else 0


def _count_hosts(text: str) -> int:
    """Returns the number of hosts that JSON lists; 0 if it lists none."""
    try:
        value = parse_json(text)
    except ValueError:
        return 0
    if isinstance(value, dict):
        value = value.get("hosts") or value.get("cluster", value)
    lists = value.values() if isinstance(value, dict) else [value]
    return sum(len(hosts) for hosts in lists if isinstance(hosts, list))
