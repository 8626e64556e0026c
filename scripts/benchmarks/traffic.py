"""Bytes of a worker with parameter servers, for the part traffic.

    python -m scripts.benchmarks.traffic '{"micro_steps": 48}'

Both servers are in this process and see each other's address as a port that forwards,
and counts. Other traffic of the machine does not count.
"""

import json
import os
import socket
import sys
import threading

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

from estimator_accum import make_accumulating_train_op
from scripts.benchmarks.base import serve

v1 = tf.compat.v1
_STEPS = 8  # K [micro-steps per update]
_WIDTH, _TOUCHED_ROWS, _COLUMNS = 512, 500, 32  # rows in a window
_TABLES = (1_000, 100_000, 1_000_000)  # rows of the embedding
_WORKER = "/job:worker/task:0"


class _Counter:
    """Ports that forward to others and count.

    Attributes:
        total: Bytes that they have forwarded so far, in both directions.
    """

    def __init__(self):
        self.total, self._lock = 0, threading.Lock()

    def forward_to(self, port: int) -> str:
        """Returns the address of a new port, whose connections go to `port`."""
        listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(
            target=self._accept, args=(listener, port), daemon=True
        ).start()
        return f"127.0.0.1:{listener.getsockname()[1]}"

    def _accept(self, listener: socket.socket, port: int) -> None:
        while True:
            caller, _ = listener.accept()
            callee = socket.create_connection(("127.0.0.1", port))
            for ends in ((caller, callee), (callee, caller)):
                threading.Thread(target=self._copy, args=ends, daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        while content := source.recv(1 << 16):
            with self._lock:
                self.total += len(content)
            target.sendall(content)


def main() -> None:
    spec, counter = json.loads(sys.argv[1]), _Counter()
    servers = _start(counter)

    def measure(make_loss, steps: int) -> float:
        target, micro_steps = servers["worker"].target, spec["micro_steps"]
        return _bytes_of(counter, target, make_loss, steps, micro_steps)

    dense = {f"K={steps}": measure(_dense, steps) for steps in (1, _STEPS)}
    sparse = {
        f"{rows:,} rows": measure(lambda rows=rows: _sparse(rows), _STEPS)
        for rows in _TABLES
    }
    serve({"dense": dense, "sparse": sparse})


def _start(counter: _Counter) -> dict[str, tf.distribute.Server]:
    """Returns a worker's server and a parameter server."""
    probes = {job: socket.create_server(("127.0.0.1", 0)) for job in ("worker", "ps")}
    ports = {job: probe.getsockname()[1] for job, probe in probes.items()}
    for probe in probes.values():
        probe.close()
    seen = {job: counter.forward_to(port) for job, port in ports.items()}
    servers = {}
    for job, port in ports.items():
        addresses = seen | {job: f"127.0.0.1:{port}"}
        cluster = {other: [address] for other, address in addresses.items()}
        servers[job] = v1.train.Server(cluster, job, 0)
    return servers


def _bytes_of(counter, target: str, make_loss, steps: int, micro_steps: int) -> float:
    """Returns the bytes of a micro-step, after a first window."""
    setter = v1.train.replica_device_setter(ps_tasks=1, worker_device=_WORKER)
    with tf.Graph().as_default(), v1.device(setter):
        v1.train.get_or_create_global_step()
        optimizer = v1.train.AdagradOptimizer(0.1)
        train_op = make_accumulating_train_op(make_loss(), optimizer, steps)
        with v1.Session(target) as session:
            session.run([v1.global_variables_initializer()])
            session.run([v1.local_variables_initializer()])
            for _ in range(_STEPS):
                session.run(train_op)
            before = counter.total
            for _ in range(micro_steps):
                session.run(train_op)
            return (counter.total - before) / micro_steps


def _dense() -> tf.Tensor:
    """Returns the loss of a layer of 1.06 MB."""
    kernel = v1.get_variable("kernel", [_WIDTH, _WIDTH + 4])
    bias = v1.get_variable("bias", [_WIDTH + 4])
    return tf.reduce_mean((tf.tanh(tf.ones([4, _WIDTH]) @ kernel) + bias) ** 2)


def _sparse(rows: int) -> tf.Tensor:
    """Returns the loss of an embedding, of which a window touches 500 rows."""
    table = v1.get_variable(f"table_{rows}", [rows, _COLUMNS])
    looked_up = tf.random.uniform([_TOUCHED_ROWS // _STEPS], 0, rows, tf.int64)
    return tf.reduce_mean(tf.gather(table, looked_up) ** 2)


if __name__ == "__main__":
    main()
