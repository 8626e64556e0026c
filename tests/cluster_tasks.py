"""What tests give the processes that they start as tasks of a cluster, or alone."""

import contextlib
import json
import os
import socket


def tf_configs(*jobs: str) -> list[dict]:
    """Returns the `TF_CONFIG` of each task, on free ports; a job may come twice."""
    cluster, tasks = {}, []
    with contextlib.ExitStack() as stack:  # open until all have a port
        for job in jobs:
            each = stack.enter_context(socket.socket())
            each.bind(("127.0.0.1", 0))
            addresses = cluster.setdefault(job, [])
            tasks.append({"type": job, "index": len(addresses)})
            addresses.append(f"127.0.0.1:{each.getsockname()[1]}")
    return [{"cluster": cluster, "task": task} for task in tasks]


def environment(tf_config: dict | None = None) -> dict[str, str]:
    """Returns that of a task; None is a process that is in no cluster."""
    alone = {
        name: value
        for name, value in os.environ.items()
        if name != "TF_CONFIG" and not name.startswith("SLURM_")
    }
    return alone | ({"TF_CONFIG": json.dumps(tf_config)} if tf_config else {})
