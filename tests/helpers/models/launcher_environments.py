"""Environments of launchers, with the cluster that each describes.

A source is the launcher's code or documentation at the time of writing, or the launcher
itself, run with `env` as its command. Variables that describe no task are left out.
"""

import json
from typing import NamedTuple

ALONE = "alone"


class Recorded(NamedTuple):
    """One process's environment.

    Attributes:
        name: Launcher, and the kind of job.
        source: Source of the variables.
        environment: Environment variables.
        expected: Task and addresses of a cluster, such as "worker 1: a:2222 b:2222", the
            chief's address first and servers behind "ps"; `ALONE`; or the variable that
            the refusal names, such as "refused: RANK".
    """

    name: str
    source: str
    environment: dict[str, str]
    expected: str


def _tf_config(cluster, task_type, index, **others) -> dict[str, str]:
    task = {"type": task_type, "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task, **others})}


_TF_OPERATOR = "kubeflow/training-operator, pkg/controller.v1/tensorflow/tensorflow.go"
_JOB = "mnist-{}.kubeflow.svc:2222"
_TF_JOB = {
    "chief": [_JOB.format("chief-0")],
    "worker": [_JOB.format("worker-0"), _JOB.format("worker-1")],
}
_TF_JOB_ADDRESSES = " ".join([*_TF_JOB["chief"], *_TF_JOB["worker"]])
_TF_JOB_PS = {"ps": [_JOB.format("ps-0")], "worker": [_JOB.format("worker-0")]}
_SPARSE = {"worker": {"1": _JOB.format("worker-1")}, "ps": [_JOB.format("ps-0")]}

_AI_PLATFORM = "cloud.google.com/ai-platform/training/docs/distributed-training-details"
_VERTEX = "cloud.google.com/vertex-ai/docs/training/distributed-training"
_POOL = "cmle-training-workerpool{}-9b6f87bcee-{}:2222"
_MASTER = {
    "master": ["cmle-training-master-1a2b-0:2222"],
    "worker": ["cmle-training-worker-1a2b-0:2222"],
}


def _pools(*sizes: int) -> dict[str, list[str]]:
    return {
        f"workerpool{pool}": [_POOL.format(pool, i) for i in range(size)]
        for pool, size in enumerate(sizes)
        if size
    }


def _vertex(pools, task_type, index) -> dict[str, str]:
    task = {"type": task_type, "index": index, "trial": ""}
    spec = {"cluster": pools, "task": task, "environment": "cloud", "job": "{}"}
    return {"CLUSTER_SPEC": json.dumps(spec)}


_TOOLKIT = "aws/sagemaker-tensorflow-training-toolkit, training.py"
_SAGEMAKER = "aws/sagemaker-training-toolkit, ENVIRONMENT_VARIABLES.md"
_SM = {
    "SM_HOSTS": '["algo-1","algo-2"]',
    "SM_CURRENT_HOST": "algo-2",
    "SM_RESOURCE_CONFIG": '{"current_host":"algo-2","hosts":["algo-1","algo-2"]}',
}
_SM_PS = {
    "master": ["algo-1:2222"],
    "ps": ["algo-1:2223", "algo-2:2223"],
    "worker": ["algo-2:2222"],
}

_SRUN = "slurm.schedmd.com/srun.html, output environment variables"
_OPEN_MPI = "Open MPI 5.0.11, mpirun -n 2 env"
_HYDRA = "MPICH 5.0.2, mpiexec.hydra -n 2 env"
_ELASTIC = "pytorch/pytorch, elastic/agent/server/local_elastic_agent.py"
_TRAINER = "kubeflow/trainer, pkg/runtime/framework/plugins/torch/torch.go"
_HOROVOD = "horovod/horovod, runner/gloo_run.py"


def _slurm(node, local, rank, nodes, tasks, size) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "4242",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local),
        "SLURMD_NODENAME": node,
        "SLURM_NTASKS": str(size),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": tasks,
    }


def _open_mpi(rank, size, local_rank, local_size) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank),
        "PMIX_NAMESPACE": "prterun-vm-32202@1",
        "PMIX_RANK": str(rank),
    }


def _torchrun(rank, size, local_size) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "GROUP_RANK": str(rank // local_size),
        "LOCAL_RANK": str(rank % local_size),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(local_size),
        "GROUP_WORLD_SIZE": str(size // local_size),
        "MASTER_ADDR": "vm",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "none",
    }


def _horovod(rank, local_size) -> dict[str, str]:
    return {
        "HOROVOD_HOSTNAME": "localhost",
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": "2",
        "HOROVOD_LOCAL_SIZE": str(local_size),
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": "35117",
        "HOROVOD_CONTROLLER": "gloo",
    }


RECORDED = [
    Recorded(
        "Kubeflow TFJob v1, a worker behind a chief",
        _TF_OPERATOR,
        _tf_config(_TF_JOB, "worker", 1, environment="cloud"),
        f"worker 1: {_TF_JOB_ADDRESSES}",
    ),
    Recorded(
        "Kubeflow TFJob v1, the evaluator, which no task lists",
        _TF_OPERATOR,
        _tf_config(_TF_JOB, "evaluator", 0, environment="cloud"),
        f"evaluator 0: {_TF_JOB_ADDRESSES}",
    ),
    Recorded(
        "Kubeflow TFJob v1, a worker with a parameter server",
        _TF_OPERATOR,
        _tf_config(_TF_JOB_PS, "worker", 0, environment="cloud"),
        f"worker 0: {_TF_JOB_PS['worker'][0]} ps {_TF_JOB_PS['ps'][0]}",
    ),
    Recorded(
        "Kubeflow TFJob v1, a parameter server",
        _TF_OPERATOR,
        _tf_config(_TF_JOB_PS, "ps", 0, environment="cloud"),
        f"ps 0: {_TF_JOB_PS['worker'][0]} ps {_TF_JOB_PS['ps'][0]}",
    ),
    Recorded(
        "Kubeflow TFJob v1, enableDynamicWorker",
        _TF_OPERATOR,
        {
            "TF_CONFIG": json.dumps(
                {"sparseCluster": _SPARSE, "task": {"type": "worker", "index": 1}}
            )
        },
        "refused: TF_CONFIG",
    ),
    Recorded(
        "Kubeflow TFJob v1, Master for Chief",
        _TF_OPERATOR,
        _tf_config({"master": ["a:2222"], "worker": ["b:2222"]}, "master", 0),
        "chief 0: a:2222 b:2222",
    ),
    Recorded(
        "DLRover, types without tasks are null",
        "intelligent-machine-learning/dlrover, go/operator/pkg/controllers/training",
        _tf_config({"ps": None, "chief": ["a:3333"], "worker": ["b:3333"]}, "chief", 0),
        "chief 0: a:3333 b:3333",
    ),
    Recorded(
        "AI Platform, runtime version 1.15, the master",
        _AI_PLATFORM,
        _tf_config(_MASTER, "master", 0, environment="cloud", job={}),
        f"chief 0: {_MASTER['master'][0]} {_MASTER['worker'][0]}",
    ),
    Recorded(
        "AI Platform, one machine",
        _AI_PLATFORM,
        _tf_config({"chief": ["127.0.0.1:2222"]}, "chief", 0, environment="cloud"),
        "chief 0: 127.0.0.1:2222",
    ),
    Recorded(
        "Vertex AI, the second worker, and a container without TF_CONFIG",
        _VERTEX,
        _vertex(_pools(1, 2), "workerpool1", 1),
        f"worker 1: {_POOL.format(0, 0)} {_POOL.format(1, 0)} {_POOL.format(1, 1)}",
    ),
    Recorded(
        "Vertex AI, the primary, with a parameter server",
        _VERTEX,
        _vertex(_pools(1, 0, 1), "workerpool0", 0),
        f"chief 0: {_POOL.format(0, 0)} ps {_POOL.format(2, 0)}",
    ),
    Recorded(
        "Vertex AI, the evaluator",
        _VERTEX,
        _vertex(_pools(1, 1, 0, 1), "workerpool3", 0),
        f"evaluator 0: {_POOL.format(0, 0)} {_POOL.format(1, 0)}",
    ),
    Recorded(
        "Vertex AI, one machine", _VERTEX, _vertex(_pools(1), "workerpool0", 0), ALONE
    ),
    Recorded(
        "Vertex AI, two primaries",
        _VERTEX,
        _vertex(_pools(2), "workerpool0", 0),
        "refused: CLUSTER_SPEC",
    ),
    Recorded(
        "SageMaker, two hosts", _SAGEMAKER, _SM, "worker 1: algo-1:2222 algo-2:2222"
    ),
    Recorded(
        "SageMaker, one host",
        _SAGEMAKER,
        {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"},
        ALONE,
    ),
    Recorded(
        "SageMaker, distribution of parameter_server",
        _TOOLKIT,
        _SM | _tf_config(_SM_PS, "master", 0, environment="cloud"),
        "chief 0: algo-1:2222 algo-2:2222 ps algo-1:2223 algo-2:2223",
    ),
    Recorded(
        "SageMaker, its resource configuration alone",
        _SAGEMAKER,
        {"SM_RESOURCE_CONFIG": _SM["SM_RESOURCE_CONFIG"]},
        "refused: SM_RESOURCE_CONFIG",
    ),
    Recorded(
        "SageMaker, distribution of mpi, two processes a host",
        _SAGEMAKER,
        _SM | _open_mpi(2, 4, 0, 2),
        "refused: OMPI_COMM_WORLD_SIZE",
    ),
    Recorded(
        "Slurm, two tasks on the first node",
        _SRUN,
        _slurm("n1", 1, 1, "n[1-2]", "2,1", 3),
        "worker 1: n1:23904 n1:23905 n2:23904",
    ),
    Recorded(
        "Slurm, several ranges, and text behind them",
        _SRUN,
        _slurm("rack2n08-ib", 0, 2, "rack[1-2]n[08-09]-ib", "1(x4)", 4),
        "worker 2: rack1n08-ib:23904 rack1n09-ib:23904 rack2n08-ib:23904 "
        "rack2n09-ib:23904",
    ),
    Recorded(
        "Slurm, the second step of a job",
        _SRUN,
        _slurm("a", 0, 0, "a,b", "1(x2)", 2) | {"SLURM_STEP_ID": "1"},
        "worker 0: a:31520 b:31520",
    ),
    Recorded(
        "Slurm, a batch script without srun",
        "slurm.schedmd.com/sbatch.html, output environment variables",
        {"SLURM_JOB_ID": "4242", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
        "refused: SLURM_NTASKS",
    ),
    Recorded(
        "Slurm, a job with two components",
        "slurm.schedmd.com/heterogeneous_jobs.html",
        _slurm("a", 0, 0, "a,b", "1(x2)", 2) | {"SLURM_HET_SIZE": "2"},
        "refused: SLURM_HET_SIZE",
    ),
    Recorded(
        "Slurm, the second of two components with a task each",
        "slurm.schedmd.com/heterogeneous_jobs.html",
        _slurm("b", 0, 1, "b", "1", 1),
        "refused: SLURM_PROCID",
    ),
    Recorded("Slurm, one task", _SRUN, _slurm("a", 0, 0, "a", "1", 1), ALONE),
    Recorded(
        "srun --mpi=pmi2, which MPICH reads",
        "slurm.schedmd.com/mpi_guide.html",
        _slurm("b", 0, 1, "a,b", "1(x2)", 2) | {"PMI_RANK": "1", "PMI_SIZE": "2"},
        "worker 1: a:23904 b:23904",
    ),
    Recorded(
        "srun of two torchruns",
        _ELASTIC,
        _slurm("b", 0, 1, "a,b", "1(x2)", 2) | _torchrun(0, 2, 2),
        "refused: Slurm and torchrun",
    ),
    Recorded(
        "Open MPI on one machine",
        _OPEN_MPI,
        _open_mpi(1, 2, 1, 2),
        "worker 1: localhost:22826 localhost:22827",
    ),
    Recorded(
        "Open MPI on two machines",
        "docs.open-mpi.org, environment variables of mpirun",
        _open_mpi(1, 2, 0, 1),
        "refused: OMPI_COMM_WORLD_SIZE",
    ),
    Recorded("Open MPI, one process", _OPEN_MPI, _open_mpi(0, 1, 0, 1), ALONE),
    Recorded(
        "MPICH, Hydra on one machine, whose jobs have no name",
        _HYDRA,
        {
            "PMI_RANK": "0",
            "PMI_SIZE": "2",
            "MPI_LOCALRANKID": "0",
            "MPI_LOCALNRANKS": "2",
        },
        "refused: PMI_SIZE",
    ),
    Recorded(
        "PMIx, the second process",
        "openpmix/openpmix, PMIx_server_setup_fork",
        {"PMIX_NAMESPACE": "slurm.pmix.1.0", "PMIX_RANK": "1"},
        "refused: PMIX_RANK",
    ),
    Recorded(
        "torchrun on one machine",
        _ELASTIC,
        _torchrun(1, 2, 2),
        "worker 1: localhost:21300 localhost:21301",
    ),
    Recorded("torchrun, one process", _ELASTIC, _torchrun(0, 1, 1), ALONE),
    Recorded(
        "torchrun on two machines", _ELASTIC, _torchrun(0, 4, 2), "refused: WORLD_SIZE"
    ),
    Recorded(
        "Kubeflow PyTorchJob",
        "kubeflow/training-operator, pkg/controller.v1/pytorch/envvar.go",
        {
            "WORLD_SIZE": "2",
            "RANK": "0",
            "MASTER_ADDR": "digits-master-0",
            "MASTER_PORT": "23456",
            "PET_NNODES": "2",
        },
        "refused: WORLD_SIZE",
    ),
    Recorded(
        "Kubeflow Trainer, the torch runtime",
        _TRAINER,
        {
            "PET_NNODES": "2",
            "PET_NPROC_PER_NODE": "1",
            "PET_NODE_RANK": "0",
            "PET_MASTER_ADDR": "digits-node-0-0.digits",
            "PET_MASTER_PORT": "29400",
        },
        "refused: PET_NNODES",
    ),
    Recorded(
        "Kubeflow Trainer, elastic",
        "kubeflow/training-operator, pkg/controller.v1/pytorch/elastic.go",
        {"PET_RDZV_ENDPOINT": "digits-worker-0:29400", "PET_NNODES": "1:3"},
        "refused: PET_NNODES",
    ),
    Recorded(
        "a Kubernetes Job, its second pod",
        "kubernetes.io/docs/concepts/workloads/controllers/job",
        {"JOB_COMPLETION_INDEX": "1"},
        "refused: JOB_COMPLETION_INDEX",
    ),
    Recorded(
        "horovodrun on one machine",
        _HOROVOD,
        _horovod(0, 2),
        "worker 0: localhost:22514 localhost:22515",
    ),
    Recorded(
        "horovodrun on two machines",
        _HOROVOD,
        _horovod(1, 1),
        "refused: HOROVOD_SIZE",
    ),
    Recorded(
        "Ray Train, TensorflowTrainer",
        "ray-project/ray, python/ray/train/tensorflow/config.py",
        _tf_config({"worker": ["10.0.0.4:39021", "10.0.0.5:41733"]}, "worker", 0),
        "worker 0: 10.0.0.4:39021 10.0.0.5:41733",
    ),
    Recorded(
        "Ray Train, TorchTrainer",
        "ray-project/ray, python/ray/train/torch/config.py",
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.4"},
        "refused: WORLD_SIZE",
    ),
    Recorded(
        "Spark, MirroredStrategyRunner",
        "tensorflow/ecosystem, spark-tensorflow-distributor",
        _tf_config({"worker": ["10.1.0.7:33551", "10.1.0.8:45123"]}, "worker", 1),
        "worker 1: 10.1.0.7:33551 10.1.0.8:45123",
    ),
    Recorded(
        "Spark, TensorFlowOnSpark",
        "yahoo/TensorFlowOnSpark, tensorflowonspark/TFSparkNode.py",
        _tf_config(
            {"chief": ["e0:41001"], "ps": ["e1:41002"], "worker": ["e2:41003"]},
            "worker",
            0,
            environment="cloud",
        ),
        "worker 0: e0:41001 e2:41003 ps e1:41002",
    ),
    Recorded(
        "LeaderWorkerSet, its leader",
        "lws.sigs.k8s.io/docs/reference/labels-annotations-and-environment-variables",
        {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "0"},
        "refused: LWS_GROUP_SIZE",
    ),
    Recorded(
        "jsrun",
        "IBM Job Step Manager, environment variables",
        {"JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_RANK": "0"},
        "refused: JSM_NAMESPACE_SIZE",
    ),
    Recorded(
        "AWS Batch, two nodes",
        "docs.aws.amazon.com/batch/latest/userguide/job_env_vars.html",
        {"AWS_BATCH_JOB_NUM_NODES": "2", "AWS_BATCH_JOB_NODE_INDEX": "0"},
        "refused: AWS_BATCH_JOB_NUM_NODES",
    ),
    Recorded(
        "SageMaker, distribution of mpi, one process a host, the second host",
        "aws/sagemaker-training-toolkit, mpi.py, which exports SM_CURRENT_HOST",
        _SM | {"SM_CURRENT_HOST": "algo-1"} | _open_mpi(1, 2, 0, 1),
        "refused: OMPI_COMM_WORLD_RANK",
    ),
    Recorded(
        "SageMaker, distribution of mpi, one process a host, the first host",
        "aws/sagemaker-training-toolkit, mpi.py",
        _SM | {"SM_CURRENT_HOST": "algo-1"} | _open_mpi(0, 2, 0, 1),
        "worker 0: algo-1:2222 algo-2:2222",
    ),
    Recorded(
        "Volcano, the first of four workers",
        "volcano-sh/volcano, pkg/controllers/job/plugins/svc and env",
        {"VC_TASK_INDEX": "0", "VK_TASK_INDEX": "0", "VC_WORKER_NUM": "4"},
        r"refused: VC_\*_NUM=4",
    ),
    Recorded(
        "Volcano, a master and a worker, both the first of their type",
        "volcano-sh/volcano, pkg/controllers/job/plugins/svc",
        {"VC_TASK_INDEX": "0", "VC_MASTER_NUM": "1", "VC_WORKER_NUM": "1"},
        r"refused: VC_\*_NUM=1\+1",
    ),
    Recorded(
        "Volcano, one task",
        "volcano-sh/volcano, pkg/controllers/job/plugins/svc",
        {"VC_TASK_INDEX": "0", "VC_WORKER_NUM": "1", "VC_WORKER_HOSTS": "j-worker-0.j"},
        ALONE,
    ),
    Recorded(
        "HTCondor, the first node of the parallel universe",
        "htcondor.readthedocs.io, parallel applications",
        {"_CONDOR_PROCNO": "0", "_CONDOR_NPROCS": "2"},
        "refused: _CONDOR_NPROCS",
    ),
    Recorded(
        "Torque, a job's own script with two cores",
        "adaptivecomputing/torque, src/resmom/start_exec.c",
        {"PBS_NODENUM": "0", "PBS_VNODENUM": "0", "PBS_TASKNUM": "1", "PBS_NP": "2"},
        ALONE,
    ),
    Recorded(
        "Torque, pbsdsh, the first task",
        "adaptivecomputing/torque, src/resmom/start_exec.c",
        {"PBS_NODENUM": "0", "PBS_VNODENUM": "0", "PBS_TASKNUM": "2", "PBS_NP": "2"},
        "refused: PBS_TASKNUM",
    ),
    Recorded(
        "LSF, blaunch, the first task",
        "IBM Spectrum LSF, environment variables",
        {"LSF_PM_TASKID": "1", "LSB_DJOB_NUMPROC": "2"},
        "refused: LSB_DJOB_NUMPROC",
    ),
    Recorded(
        "LSF, a job's own script with two slots",
        "IBM Spectrum LSF, environment variables",
        {"LSB_JOBID": "7", "LSB_DJOB_NUMPROC": "2"},
        ALONE,
    ),
    Recorded(
        "ModelArts, the first of two nodes",
        "Huawei ModelArts, environment variables of a training container",
        {"MA_NUM_HOSTS": "2", "VC_TASK_INDEX": "0"},
        "refused: MA_NUM_HOSTS",
    ),
    Recorded(
        "Lightning, the first of two nodes",
        "Lightning-AI/pytorch-lightning, plugins/environments/lightning.py",
        {"NODE_RANK": "0", "NUM_NODES": "2", "MASTER_ADDR": "a"},
        "refused: NUM_NODES",
    ),
    Recorded(
        "Lightning, the second node, whose number of nodes is an argument",
        "Lightning-AI/pytorch-lightning, plugins/environments/lightning.py",
        {"NODE_RANK": "1", "MASTER_ADDR": "a"},
        "refused: NODE_RANK",
    ),
    Recorded("a variable of somebody else", "env", {"NUM_NODES": "2"}, ALONE),
    Recorded(
        "Kubeflow PaddleJob",
        "kubeflow/training-operator, pkg/controller.v1/paddlepaddle/envvar.go",
        {"PADDLE_NNODES": "2", "PADDLE_MASTER": "digits-worker-0:36543"},
        "refused: PADDLE_NNODES",
    ),
    Recorded("a shell", "env", {"HOME": "/root", "TF_CONFIG": ""}, ALONE),
]
