"""From a launcher's environment variables to a cluster: one table.

    mpirun -n 2 python -m distributed.main      OMPI_COMM_WORLD_SIZE=2
    torchrun --nproc-per-node=2 train.py        WORLD_SIZE=2, MASTER_PORT=29500

A launcher's variables may name all tasks; then `LAUNCHERS` has a function that reads
them. They may prove that there are several processes without naming the others; then
they are refused, because each process would train alone, and all of them into one folder.
"""

import fnmatch
import functools
import json
import os
import pathlib
import re
import zlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

from estimator_accum.programs import slurm, tf_config
from estimator_accum.programs.cluster import Cluster, enter
from estimator_accum.programs.json_text import parse_json

Environment = Mapping[str, str]


class Launcher(NamedTuple):
    """The variables of one launcher.

    Attributes:
        name: Name of the launcher.
        sizes: Variables with a number of processes or nodes; of a pattern such as
            "VC_*_NUM", the numbers of all that match it are added.
        ranks: Variables with this process's number, from 0. Without one of `sizes` or
            `lists`, number 0 is the first of several, too.
        lists: Variables that list hosts, or the addresses of each type, in JSON or
            between commas.
        read: Function of an environment that returns the cluster; None where the
            variables do not describe all tasks.
        local: Variable with the number of processes on this machine, and one that differs
            between two jobs on it. The first of `sizes` and of `ranks` are of its tasks.
        only_with: Variable without which the others prove nothing, since they have
            common names or count cores; "" for none.
    """

    name: str
    sizes: tuple[str, ...] = ()
    ranks: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    read: Callable[[Environment], Cluster | None] = lambda environment: None
    local: tuple[str, str] | None = None
    only_with: str = ""


def read_vertex(environment: Environment) -> Cluster | None:
    """Returns Vertex AI's cluster: the pools are chief, workers, servers, evaluator."""
    text = environment.get("CLUSTER_SPEC", "")
    if '"workerpool' not in text:
        return None  # a variable of somebody else
    return tf_config.read_json(text, tf_config.CLUSTER_SPEC)


def read_sagemaker(environment: Environment) -> Cluster | None:
    """Returns a worker on each host of SageMaker, whose hosts reach all ports.

    Its toolkit sets variables; in other containers a file alone lists the hosts.
    """
    hosts = _parsed(environment.get("SM_HOSTS", ""))
    this_host = environment.get("SM_CURRENT_HOST")
    if hosts is None and _SAGEMAKER_FILE.exists():
        config = _parsed(_SAGEMAKER_FILE.read_text(encoding="utf-8", errors="replace"))
        if isinstance(config, dict):
            hosts, this_host = config.get("hosts"), config.get("current_host")
    if not isinstance(hosts, list) or this_host not in hosts:
        return None
    return Cluster(
        workers=tuple(f"{host}:{_SAGEMAKER_PORT}" for host in hosts),
        task_type="worker",
        task_index=hosts.index(this_host),
    )


_SAGEMAKER_FILE = pathlib.Path("/opt/ml/input/config/resourceconfig.json")
_SAGEMAKER_PORT = 2222  # as in SageMaker's own `TF_CONFIG`


def read_slurm(environment: Environment) -> Cluster | None:
    """Returns a worker for each task of a step of `srun`."""
    if environment.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        return None
    addresses, index = slurm.read_step(environment)
    return Cluster(workers=tuple(addresses), task_type="worker", task_index=index)


def _read_local(launcher: Launcher, environment: Environment) -> Cluster | None:
    """Returns the workers of a launcher on one machine, with ports of their job."""
    if launcher.local is None:
        return None
    names = (launcher.sizes[0], launcher.ranks[0], *launcher.local)
    size, rank, local_size, job = (environment.get(name) for name in names)
    num_workers, num_local = _last_number(size or ""), _last_number(local_size or "")
    is_numbered = (rank or "").strip().isdecimal()
    if num_workers != num_local or job is None or not is_numbered:
        return None
    first = slurm.first_port(zlib.crc32(job.encode()))
    return Cluster(
        workers=tuple(f"localhost:{first + i}" for i in range(num_workers)),
        task_type="worker",
        task_index=_last_number(rank),
    )


def _last_number(text: str) -> int:
    """Returns the number, of a range such as "1:4" its end; 0 if there is none."""
    match = re.fullmatch(r"\s*(?:\d+:)?(\d{1,9})\s*", text)
    return int(match[1]) if match else 0


def _parsed(text: str):
    """Returns the value of JSON; None if it is none."""
    try:
        return parse_json(text)
    except ValueError:
        return None


def _count_hosts(text: str) -> int:
    """Returns the number of hosts in JSON, or between commas; 0 for another text."""
    value = _parsed(text)
    if value is None and re.fullmatch(r"[\w.:-]+(,[\w.:-]+)*", text):
        return 1 + text.count(",")
    if isinstance(value, dict):
        value = value.get("hosts") or value.get("cluster", value)
    lists = value.values() if isinstance(value, dict) else [value]
    return sum(len(hosts) for hosts in lists if isinstance(hosts, list))


LAUNCHERS = (
    Launcher("Vertex AI", lists=("CLUSTER_SPEC",), read=read_vertex),
    Launcher(
        "SageMaker", lists=("SM_HOSTS", "SM_RESOURCE_CONFIG"), read=read_sagemaker
    ),
    Launcher(
        "Slurm",
        ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_JOB_NUM_NODES"),
        ("SLURM_PROCID",),
        read=read_slurm,
    ),
    Launcher(
        "Open MPI",
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_RANK",),
        local=("OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE"),
    ),
    Launcher(
        "torchrun",
        ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "PET_NNODES"),
        ("RANK", "GROUP_RANK", "PET_NODE_RANK"),
        local=("LOCAL_WORLD_SIZE", "MASTER_PORT"),
    ),
    Launcher(
        "horovodrun",
        ("HOROVOD_SIZE",),
        ("HOROVOD_RANK",),
        local=("HOROVOD_LOCAL_SIZE", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    ),
    Launcher("MPICH or Intel MPI", ("PMI_SIZE", "MPI_LOCALNRANKS"), ("PMI_RANK",)),
    # Other launchers start their processes by PMIx, and count them.
    Launcher(
        "PMIx",
        ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "JSM_NAMESPACE_SIZE"),
        ("PMIX_RANK",),
    ),
    Launcher("MVAPICH", ("MV2_COMM_WORLD_SIZE",), ("MV2_COMM_WORLD_RANK",)),
    Launcher("jsrun", ("JSM_NAMESPACE_SIZE",), ("JSM_NAMESPACE_RANK",)),
    Launcher("Flux", ("FLUX_JOB_SIZE",), ("FLUX_TASK_RANK",)),
    Launcher(
        "Cray's aprun or PALS",
        ("PALS_SIZE", "PMI_SIZE"),
        ("ALPS_APP_PE", "PALS_RANKID"),
    ),
    # A job's own script is task 1.
    Launcher("pbsdsh", ("PBS_TASKNUM",), ("PBS_NODENUM", "PBS_VNODENUM")),
    Launcher("LSF's blaunch", ("LSF_PM_TASKID",)),
    Launcher("LSF's blaunch", ("LSB_DJOB_NUMPROC",), only_with="LSF_PM_TASKID"),
    Launcher("HTCondor", ("_CONDOR_NPROCS",), ("_CONDOR_PROCNO",)),
    Launcher("ModelArts", ("MA_NUM_HOSTS",)),
    Launcher(  # Azure ML and others set the rank of the one node, too
        "Lightning",
        ("NUM_NODES", "WORLD_SIZE", "AZUREML_NODE_COUNT"),
        ("NODE_RANK",),
        only_with="NODE_RANK",
    ),
    Launcher("MXNet's launcher", ("DMLC_NUM_WORKER",), ("DMLC_WORKER_ID",)),
    Launcher(
        "Paddle",
        ("PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_NUM", "PADDLE_NNODES"),
        ("PADDLE_TRAINER_ID",),
    ),
    Launcher("SkyPilot", ("SKYPILOT_NUM_NODES",), ("SKYPILOT_NODE_RANK",)),
    Launcher(
        "Volcano", ("VC_*_NUM", "MA_NUM_HOSTS"), ("VC_TASK_INDEX", "VK_TASK_INDEX")
    ),
    Launcher("AWS Batch", ("AWS_BATCH_JOB_NUM_NODES",), ("AWS_BATCH_JOB_NODE_INDEX",)),
    Launcher("Azure ML", ("AZUREML_NODE_COUNT",)),
    Launcher("LeaderWorkerSet", ("LWS_GROUP_SIZE",), ("LWS_WORKER_INDEX",)),
    Launcher("NGC", ("NGC_ARRAY_SIZE",)),
    Launcher("Metaflow", ("MF_PARALLEL_NUM_NODES",), ("MF_PARALLEL_NODE_INDEX",)),
    Launcher("Volcengine", ("MLP_WORKER_NUM",)),
    Launcher("DeepSpeed", ("CROSS_SIZE",), ("CROSS_RANK",)),
    Launcher("Cloud TPU", lists=("TPU_WORKER_HOSTNAMES",)),
    # Kubeflow Trainer's are indexed, of one node as well.
    Launcher("a Kubernetes Job", ("PET_NNODES",), ("JOB_COMPLETION_INDEX",)),
)


def read_cluster(environment: Environment) -> Cluster:
    """Returns the cluster that the environment describes.

    A `TF_CONFIG` with a cluster precedes all variables, but for those that prove that
    its only task runs several times.

    Args:
        environment: Environment variables, such as `os.environ`.

    Raises:
        ValueError: If it describes a cluster that cannot train, or a launcher started
            processes that it does not describe, or two launchers describe different
            clusters; the message names the field or the variable.
    """
    cluster = tf_config.read_json(environment.get("TF_CONFIG") or "{}")
    if not cluster.is_alone:
        _check_only_task(environment, cluster)
        return cluster
    clusters = {}
    for launcher in LAUNCHERS:
        cluster = launcher.read(environment) or _read_local(launcher, environment)
        if cluster and (cluster.num_workers > 1 or cluster.servers):
            clusters[launcher.name] = cluster
    if len(clusters) > 1:
        raise ValueError(
            "One launcher must describe the tasks, or `TF_CONFIG` in each of them. "
            f"Received: {' and '.join(clusters)}, which describe different clusters. "
            "Start the tasks with one of them."
        )
    name, cluster = next(iter(clusters.items()), ("", Cluster()))
    _check_known(environment, cluster)
    if name in _OF_HOSTS:
        _check_number(environment, cluster, name)
    return cluster


# Numbers of processes that one command has started. In a step of srun they prove nothing:
# it may have started a shell, or Ray, whose processes inherit its variables.
_STARTED = (
    *("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE", "PALS_SIZE"),
    *("JSM_NAMESPACE_SIZE", "WORLD_SIZE", "HOROVOD_SIZE"),
)


def _check_only_task(environment: Environment, cluster: Cluster) -> None:
    """Raises ValueError if a launcher copied the only task of a `TF_CONFIG`.

    Of two processes, one may be an evaluator, which `TF_CONFIG` need not list.
    """
    if cluster.num_workers + len(cluster.servers) > 1:
        return
    if _last_number(environment.get("SLURM_STEP_NUM_TASKS", "")) > 1:
        return
    for name in _STARTED:
        if _last_number(environment.get(name, "")) > 2:
            raise ValueError(
                "`TF_CONFIG` must list the tasks of all processes. Received: one task, "
                f"and {name}={environment[name]}, whose processes would train alone, "
                "into one folder. Set TF_CONFIG with all addresses in each of them, or "
                f"unset {name} to train alone."
            )


_OF_HOSTS = ("Vertex AI", "SageMaker")  # whose variables another launcher may copy


def _check_number(environment: Environment, cluster: Cluster, name: str) -> None:
    """Raises ValueError if a variable gives this process another number.

    `mpirun -x` hands the variables of the first host to the processes on all hosts.
    """
    for launcher in LAUNCHERS:
        for rank in launcher.ranks:
            text = environment.get(rank, "")
            if text.strip().isdecimal() and int(text) != cluster.rank:
                raise ValueError(
                    "A process must have one number in its cluster. Received: "
                    f"{rank}={text} of {launcher.name} in {cluster.name} of {name}, "
                    "whose variables may be another host's. Set TF_CONFIG in each "
                    f"process, or unset {rank}."
                )


def _check_known(environment: Environment, cluster: Cluster) -> None:
    """Raises ValueError if variables prove more processes than the cluster has."""
    for launcher in LAUNCHERS:
        if launcher.only_with and not environment.get(launcher.only_with):
            continue
        counts = [*launcher.sizes, *launcher.lists]
        is_counted = any(_texts(environment, name) for name in counts)
        sizes = launcher.sizes
        if launcher.name == "Slurm" and "SLURM_STEP_NUM_TASKS" in environment:
            sizes = ()  # a step may have fewer tasks than its job
        for names, least in (
            (sizes, _last_number),
            (launcher.ranks, functools.partial(_least_of, is_counted)),
            (launcher.lists, _count_hosts),
        ):
            for name in names:
                texts = _texts(environment, name)
                if sum(map(least, texts)) > cluster.num_tasks:
                    raise ValueError(
                        "A cluster must be described by `TF_CONFIG` or by a launcher "
                        "that names the addresses of all tasks. Received: "
                        f"{name}={'+'.join(texts)[:80]} of {launcher.name}, whose "
                        "processes would train alone, into one folder. Start them with "
                        "srun or `estimator-accum launch`, set TF_CONFIG in each of "
                        f"them, or unset {name} to train alone."
                    )


def _texts(environment: Environment, name: str) -> list[str]:
    """Returns the values of the variables that match a name, without empty ones."""
    names = fnmatch.filter(environment, name)
    return [environment[key] for key in names if environment[key].strip()]


def _least_of(is_counted: bool, rank: str) -> int:
    """Returns the least number of processes of which one has a rank; 0 if it has none."""
    if not re.fullmatch(r"\s*\d{1,9}\s*", rank):
        return 0
    return max(int(rank) + 1, 1 if is_counted else 2)


def read_cluster_of(
    strategy: str, environment: Environment, *, may_evaluate: bool = False
) -> Cluster:
    """Returns the cluster in which this process trains, and evaluates at the end.

    Args:
        strategy: One of `STRATEGIES`; the last two train in a cluster.
        environment: Environment variables, such as `os.environ`.
        may_evaluate: Whether the program has a part for an evaluator.

    Raises:
        ValueError: If the environment describes a cluster that cannot train, or one for
            another strategy, or this task is an evaluator without a part.
    """
    if strategy in ("multi_worker", "parameter_server"):
        cluster = read_cluster(environment)
        _check_servers(cluster, strategy)
        if cluster.is_evaluator and not may_evaluate:
            raise ValueError(
                'The tasks of `TF_CONFIG["cluster"]` must train here: the first of them '
                "evaluates when training ends. Received: an evaluator. Leave it out."
            )
        if cluster.servers:
            return cluster.with_chief()  # Estimator needs one
        return cluster if may_evaluate or cluster.num_workers > 1 else Cluster()
    # Other launchers are not read here: their processes may be independent runs.
    if environment.get("TF_CONFIG"):
        cluster = tf_config.read_json(environment["TF_CONFIG"])
        _check_servers(cluster, strategy)
        if cluster.num_workers > 1 or cluster.is_evaluator:
            raise ValueError(
                "`--strategy` must be multi_worker in a cluster, or its tasks would "
                f"train over one another. Received: {strategy} in a `TF_CONFIG` with "
                f"{cluster.num_workers} tasks that train. Use --strategy=multi_worker, "
                "or unset TF_CONFIG."
            )
    return Cluster()


def _check_servers(cluster: Cluster, strategy: str) -> None:
    """Raises ValueError unless exactly "parameter_server" has parameter servers."""
    if cluster.servers and strategy != "parameter_server":
        raise ValueError(
            "`--strategy` must be parameter_server in a cluster with parameter servers. "
            f"Received: {strategy}, with {len(cluster.servers)} of ps. Use "
            "--strategy=parameter_server, or make them workers."
        )
    if strategy == "parameter_server" and not (cluster.servers or cluster.is_alone):
        raise ValueError(
            "`--strategy=parameter_server` must be given the addresses of ps. Received: "
            f"a cluster of {cluster.num_workers} tasks that train, without ps. List ps "
            "in `TF_CONFIG`, or use --strategy=multi_worker."
        )


def set_tf_config() -> Cluster:
    """Sets `TF_CONFIG` for the launcher that started this process.

        cluster = set_tf_config()  # before RunConfig and strategies, which read it
        config = tf.estimator.RunConfig(model_dir)

    It reads `TF_CONFIG` itself, and the variables of Vertex AI, SageMaker, Slurm, and, on
    one machine, of `torchrun`, `mpirun` of Open MPI and `horovodrun`. Without any of
    them this process is alone, and `TF_CONFIG` stays as it is. A `TF_CONFIG` without a
    cluster gets that of the launcher.

    The other keys of `TF_CONFIG`, such as `model_dir` and those of its task, stay.

    Returns:
        The cluster; `rank` and `num_workers` divide the data among the tasks that train.

    Raises:
        ValueError: If the environment describes a cluster that cannot train, or proves
            that there are processes whose addresses it does not name; the message names
            the variable.
    """
    cluster = read_cluster(os.environ)
    text = os.environ.get("TF_CONFIG")
    enter(cluster)
    if text and cluster.is_alone:
        os.environ["TF_CONFIG"] = text  # with keys that RunConfig reads
    elif text:
        before, config = json.loads(text), json.loads(os.environ["TF_CONFIG"])
        config["task"] = before.get("task", {}) | config["task"]
        os.environ["TF_CONFIG"] = json.dumps(before | config)
    return cluster
