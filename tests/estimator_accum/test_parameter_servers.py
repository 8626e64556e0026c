"""Parameter servers: a worker's window is its own, everything else is shared.

A cluster's servers run in this process, and its tasks in threads: sessions, devices and
the network are those of a cluster of processes.
"""

import concurrent.futures
import functools
import json
import logging
import re
import signal
import threading

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import (
    AccumulatingOptimizer,
    get_or_create_update_step,
    get_windows,
    make_accumulating_train_op,
    make_accumulation_hooks,
    microbatch_model_fn,
    whole_batch_loss,
)
from estimator_accum.core.pulling import find_uses
from estimator_accum.graph.walks import ancestors
from estimator_accum.microbatch.batch import WholeBatch
from tests.helpers.processes import parameter_server_task, running

v1 = tf.compat.v1
_ROWS, _STEPS = 40, 4
_CLUSTER = ("chief", "worker", "ps", "ps")
_WORKER = "/job:worker/task:0"


@pytest.fixture(scope="module")
def cluster():
    """Server and `TF_CONFIG` of each task of a cluster, whose servers run."""
    configs = running.tf_configs(*_CLUSTER)
    servers = [
        v1.train.Server(
            config["cluster"], config["task"]["type"], config["task"]["index"]
        )
        for config in configs
    ]
    yield {
        f"{config['task']['type']} {config['task']['index']}": (server, config)
        for server, config in zip(servers, configs, strict=True)
    }


@pytest.fixture
def tasks(cluster):
    """The cluster, whose servers hold no variables.

    Those of an earlier test would be taken for its own by a worker that comes before its
    chief, and what it trained until then would be lost.
    """
    v1.Session.reset(cluster["chief 0"][0].target)
    return cluster


def _input_fn(seed: int):
    def input_fn():
        random = np.random.RandomState(seed)
        x = random.normal(size=[96, 3]).astype(np.float32)
        rows = random.randint(0, _ROWS, [96, 2])
        data = tf.data.Dataset.from_tensor_slices(({"x": x, "rows": rows}, x[:, :1]))
        return data.batch(4, drop_remainder=True).repeat()

    return input_fn


def _loss(features, labels) -> tf.Tensor:
    """Loss of an embedding in two parts, of which rows repeat, and a layer."""
    table = v1.get_variable(
        "table",
        [_ROWS, 2],
        initializer=tf.keras.initializers.GlorotUniform(1),
        partitioner=v1.fixed_size_partitioner(2),
    )
    looked_up = v1.nn.embedding_lookup(
        table, features["rows"], partition_strategy="div"
    )
    inputs = tf.concat([features["x"], tf.reduce_sum(looked_up, 1)], 1)
    kernel = v1.get_variable(
        "kernel", [5, 1], initializer=tf.keras.initializers.GlorotUniform(2)
    )
    return tf.reduce_mean((tf.tanh(inputs @ kernel) - labels) ** 2)


def _model_fn(features, labels, mode, params):
    loss = _loss(features, labels)
    rate = 0.5 * 0.9 ** tf.cast(get_or_create_update_step(), tf.float32)
    optimizer = v1.train.AdagradOptimizer(rate)
    if params["interface"] == "train op":
        steps = params.get("steps", _STEPS)
        train_op = make_accumulating_train_op(loss, optimizer, steps, clip_norm=0.1)
    else:
        optimizer = AccumulatingOptimizer(optimizer, _STEPS, clip_norm=0.1)
        train_op = optimizer.minimize(loss, v1.train.get_global_step())
    hooks = make_accumulation_hooks(params.get("partial_window", "auto"))
    return tf.estimator.EstimatorSpec(
        mode, loss=loss, train_op=train_op, training_hooks=hooks
    )


def _whole_batch_model_fn(features, labels, mode, params):
    loss = _loss(features, labels)
    optimizer = v1.train.AdagradOptimizer(0.5)
    if params["interface"] == "whole batch":
        train_op = make_accumulating_train_op(loss, optimizer, 1, clip_norm=0.1)
    else:
        train_op = optimizer.minimize(loss, v1.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def _estimator(folder, monkeypatch, config=None, interface="train op", **params):
    """Returns the Estimator of one task; without `config` of one process alone."""
    monkeypatch.setenv("TF_CONFIG", json.dumps(config or {}))
    config = tf.estimator.RunConfig(str(folder), save_checkpoints_steps=10**6)
    monkeypatch.setenv("TF_CONFIG", "")
    params["interface"] = interface
    model_fn = _model_fn
    if interface in ("whole batch", "unedited"):
        model_fn = microbatch_model_fn(_whole_batch_model_fn, 2)
    return tf.estimator.Estimator(model_fn, config=config, params=params)


def _values(folder) -> dict[str, np.ndarray]:
    """Returns the variables of the last checkpoint, without open windows."""
    reader = tf.train.load_checkpoint(str(folder))
    names = reader.get_variable_to_shape_map()
    window = r"accumulator(_rows)?$|accumulation/(micro_steps|loss|weight)$"
    return {n: reader.get_tensor(n) for n in names if not re.search(window, n)}


@pytest.mark.parametrize("interface", ["train op", "optimizer"])
def test_a_chief_with_servers_trains_as_one_process_does(
    tmp_path, monkeypatch, tasks, interface, caplog
):
    caplog.set_level(logging.INFO, "tensorflow.estimator_accum")
    folder, max_steps = tmp_path / "chief", 3 * _STEPS + 2
    chief = _estimator(folder, monkeypatch, tasks["chief 0"][1], interface)
    chief.train(_input_fn(0), max_steps=max_steps)
    assert "2 of 4 micro-steps lost: this worker has them, and no check" in caplog.text
    assert "trained 3 updates of this worker, the last of which was 3," in caplog.text
    names = set(tf.train.load_checkpoint(str(folder)).get_variable_to_shape_map())
    alone = _estimator(tmp_path / "alone", monkeypatch, None, interface)
    alone.train(_input_fn(0), max_steps=max_steps)
    expected = _values(tmp_path / "alone")
    assert names == set(expected)  # no window is in the chief's checkpoint
    assert {n: v.tobytes() for n, v in _values(folder).items()} == {
        n: v.tobytes() for n, v in expected.items()
    }
    resumed = _estimator(folder, monkeypatch, None, interface)
    resumed.train(_input_fn(0), steps=_STEPS)
    assert resumed.get_variable_value("update_step") == 4


@pytest.mark.parametrize(
    ("params", "updates"), [({"partial_window": "apply"}, 2), ({"steps": 1}, 6)]
)
def test_applied_windows_and_single_steps_are_in_the_chiefs_checkpoint(
    tmp_path, monkeypatch, tasks, params, updates
):
    values = []
    for name, config in (("chief", tasks["chief 0"][1]), ("alone", None)):
        estimator = _estimator(tmp_path / name, monkeypatch, config, **params)
        estimator.train(_input_fn(0), max_steps=_STEPS + 2)
        values.append(_values(tmp_path / name))
    assert values[0]["update_step"] == updates
    np.testing.assert_equal(*values)


class _OtherWorker(v1.train.SessionRunHook):
    """Makes micro-steps of another worker between the chief's last save and its end."""

    def begin(self):
        self._move = v1.train.get_global_step().assign_add(5)

    def end(self, session):
        session.run(self._move)


def test_worker_0_without_a_chief_reports_and_saves_its_applied_window(tmp_path, tasks):
    def train(is_chief: bool) -> list[int]:
        def loss_fn():
            return v1.get_variable("of_worker_0", initializer=3.0) ** 2

        with tf.Graph().as_default():
            train_op, _ = _build(loss_fn)
            hooks = make_accumulation_hooks("apply", metrics_dir=tmp_path)
            with v1.train.MonitoredTrainingSession(
                tasks["worker 0"][0].target,
                is_chief,
                str(tmp_path),
                hooks=[_OtherWorker(), *hooks],
                save_checkpoint_steps=10**6,
                save_summaries_steps=None,
                log_step_count_steps=None,
            ) as session:
                for _ in range(5):
                    session.run(train_op)
        rows = (tmp_path / "train_metrics.csv").read_text().splitlines()[1:]
        return [int(row.partition(",")[0]) for row in rows]

    assert train(is_chief=True) == [1, 2, 3]
    assert _values(tmp_path)["update_step"] == 3
    assert train(is_chief=False) == [1, 2, 3]


@pytest.mark.parametrize("interface", ["whole batch", "unedited"])
def test_a_chief_with_servers_trains_whole_batches_as_one_process_does(
    tmp_path, monkeypatch, tasks, interface
):
    values, of_chief = [], tasks["chief 0"][1]
    jobs = {job: of_chief["cluster"][job] for job in ("chief", "ps")}
    for name, config in (("chief", {**of_chief, "cluster": jobs}), ("alone", None)):
        estimator = _estimator(tmp_path / name, monkeypatch, config, interface)
        estimator.train(_input_fn(0), max_steps=3)
        values.append(_values(tmp_path / name))
    servers, alone = ({n: v.tobytes() for n, v in run.items()} for run in values)
    assert servers == alone


class _Chief(v1.train.SessionRunHook):
    """Says that the variables are there, and waits for the worker's first run."""

    def __init__(self):
        self.initialized, self.joined = threading.Event(), threading.Event()

    def after_create_session(self, session, coord):
        self.initialized.set()
        assert self.joined.wait(300)


class _Worker(v1.train.SessionRunHook):
    """Tells the chief of the worker's first run."""

    def __init__(self, chief: _Chief):
        self._chief = chief

    def after_run(self, run_context, run_values):
        self._chief.joined.set()


def test_every_micro_step_is_in_an_update_or_in_an_open_window(
    tmp_path, monkeypatch, tasks, caplog
):
    caplog.set_level(logging.INFO, "tensorflow.estimator_accum")
    chief, worker = (
        _estimator(tmp_path, monkeypatch, tasks[name][1])
        for name in ("chief 0", "worker 0")
    )
    of_chief = _Chief()
    of_worker = _Worker(of_chief)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        runs = [pool.submit(chief.train, _input_fn(0), [of_chief], max_steps=400)]
        # A worker that comes before the variables looks again after 30 seconds.
        assert of_chief.initialized.wait(300)
        runs.append(pool.submit(worker.train, _input_fn(1), [of_worker], max_steps=400))
        for run in runs:
            run.result()
    held = sum(map(int, re.findall(r"(\d) of 4 micro-steps lost", caplog.text)))
    counts = re.findall(r"trained (\d+) updates? of this worker", caplog.text)
    global_step, update_step = _counters(tasks["chief 0"][0].target, servers=(0, 0))
    assert len(counts) == 2 and "0" not in counts
    assert sum(map(int, counts)) == update_step
    assert global_step == update_step * _STEPS + held >= 400


def _counters(target: str, servers: tuple[int, int]) -> tuple[int, int]:
    """Returns global_step and update_step, which are on these servers."""
    # Other tasks may have ended, and a session would wait for them.
    config = v1.ConfigProto(device_filters=["/job:ps"])
    with tf.Graph().as_default(), v1.Session(target, config=config) as session:
        reads = []
        for number, name in zip(servers, ("global_step", "update_step")):
            with tf.device(f"/job:ps/task:{number}"):
                handle = tf.raw_ops.VarHandleOp(
                    dtype=tf.int64, shape=[], shared_name=name
                )
                read = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.int64)
                reads.append(read)
        return tuple(map(int, session.run(reads)))


@pytest.mark.once  # the test above has the sessions of two workers
def test_a_cluster_loses_the_window_of_a_killed_worker_alone(tmp_path, monkeypatch):
    """The cluster: a chief, two workers, two servers and an evaluator."""
    chief, steady, mortal, *of_servers = running.tf_configs(
        "chief", "worker", "worker", "ps", "ps"
    )
    servers = [
        v1.train.Server(config["cluster"], "ps", number)
        for number, config in enumerate(of_servers)
    ]
    evaluator = {**chief, "task": {"type": "evaluator", "index": 0}}
    command = ("-m", parameter_server_task.__name__, tmp_path)
    with (
        running.start(*command, tf_config=chief) as first,
        running.start(*command, tf_config=steady) as second,
    ):
        dead = running.run(*command, "dies", tf_config=mortal)
        assert dead.returncode == -signal.SIGKILL
        with running.start(*command, "again", tf_config=mortal) as third:
            monkeypatch.setenv("TF_CONFIG", json.dumps(evaluator))
            parameter_server_task.train(tmp_path)
            tasks = [task.wait() for task in (first, second, third)]
    assert [task.returncode for task in tasks] == [0, 0, 0]
    output = "".join(task.output for task in tasks)
    global_step, update_step = _counters(servers[0].target, servers=(0, 1))
    steps, lost = parameter_server_task.STEPS, parameter_server_task.DEATH
    counts = re.findall(r"trained (\d+) updates? of this worker", output)
    assert len(counts) == 3 and sum(map(int, counts)) + lost // steps == update_step
    held = sum(map(int, re.findall(r"(\d) of 4 micro-steps lost", output)))
    assert global_step == update_step * steps + held + lost % steps
    assert list(tmp_path.glob("model/export/final/*/saved_model.pb"))
    monkeypatch.setenv("TF_CONFIG", "{}")
    alone = tf.estimator.Estimator(parameter_server_task.model_fn, tmp_path / "model")
    saved = alone.get_variable_value("update_step")
    alone.train(parameter_server_task.input_fn, steps=steps)
    assert alone.get_variable_value("update_step") == saved + 1


def _build(loss_fn, **options) -> tuple[tf.Operation, list[tf.Variable]]:
    """Makes a worker's train op; returns it and its local variables."""
    setter = v1.train.replica_device_setter(ps_tasks=2, worker_device=_WORKER)
    with v1.device(setter):
        v1.train.get_or_create_global_step()
        optimizer = v1.train.GradientDescentOptimizer(1.0)
        train_op = make_accumulating_train_op(loss_fn(), optimizer, 2, **options)
    return train_op, v1.local_variables()


def test_a_window_is_on_the_worker_and_the_rest_on_the_servers():
    def loss_fn():
        table = v1.get_variable("table", [10**6, 8])
        bias = v1.get_variable("bias", [8], initializer=v1.zeros_initializer())
        return tf.reduce_sum(tf.gather(table, [1, 1, 7]) + bias)

    with tf.Graph().as_default():
        _, window = _build(loss_fn, clip_norm=1.0, noise_scale=True)
        assert {v.op.name: v.shape.as_list() for v in window} == {
            "accumulation/loss": [],
            "accumulation/weight": [],
            "accumulation/squares": [],
            "accumulation/count": [],
            "accumulation/micro_steps": [],
            "bias/accumulator": [8],
            "bias/copy": [8],
            "table/accumulator": [None, 8],  # of the slices alone
            "table/accumulator_rows": [None],
        }
        assert {v.device for v in window} == {_WORKER}
        shared = {v.op.name: v.device for v in v1.global_variables()}
        assert {"update_step", "accumulation/clipped_updates"} <= set(shared)
        assert {device.rpartition("/")[0] for device in shared.values()} == {"/job:ps"}
        assert get_windows()[0].state == [get_windows()[0].update_step]


def _half_square(x):
    return 0.5 * x**2  # its gradient is x


def _in_functions(x):
    inner = tf.function(lambda: x * 1.0)
    return tf.function(lambda: _half_square(inner()))()


def _in_a_loop(x):
    def body(i, total):
        return i + 1, total + _half_square(x.read_value()) / 2.0

    return tf.while_loop(lambda i, _: i < 2, body, [0, 0.0])[1]


def _in_a_branch(x):
    is_read = v1.placeholder_with_default(True, [])
    return v1.cond(is_read, lambda: _half_square(x.read_value()), lambda: 0.0)


def _of_version_1(make):
    def made(*args, **kwargs):
        v1.disable_control_flow_v2()
        try:
            return make(*args, **kwargs)
        finally:
            v1.enable_control_flow_v2()

    return made


def _in_a_function_in_a_branch_of_version_1(x):
    function = tf.function(lambda: _half_square(x))
    v1.disable_control_flow_v2()
    try:
        return v1.cond(v1.placeholder_with_default(True, []), function, lambda: 0.0)
    finally:
        v1.enable_control_flow_v2()


def _after_a_check(x):
    checked = tf.debugging.assert_positive(v1.placeholder_with_default(1.0, []))
    with tf.control_dependencies([checked]):
        value = x.read_value()
    return _half_square(value)


def _in_a_recomputed_layer(x):
    return _half_square(tf.recompute_grad(lambda ones: ones * x)(tf.ones([])))


@pytest.mark.parametrize(
    "make",
    [
        _half_square,
        _in_functions,
        _in_a_loop,
        _in_a_branch,
        _of_version_1(_in_a_branch),
        _of_version_1(_in_a_loop),
        _in_a_function_in_a_branch_of_version_1,
        _after_a_check,
        _in_a_recomputed_layer,
    ],
)
def test_a_window_reads_the_weights_that_it_pulled(tasks, make):
    """Others write to the servers in mid-window."""
    _check_that_it_pulls_once(tasks, make)


def test_a_window_reads_the_reference_variable_that_it_pulled(tasks):
    check = _of_version_1(functools.partial(_check_that_it_pulls_once, tasks))
    check(_half_square, use_resource=False)


def _check_that_it_pulls_once(tasks, make, **options):
    with tf.Graph().as_default():
        x = []

        def loss_fn():
            x.append(v1.get_variable("x", initializer=3.0, **options))
            return make(x[0])

        train_op, _ = _build(loss_fn)
        of_others, value = x[0].assign(10.0), x[0].read_value()
        with v1.Session(tasks["worker 0"][0].target) as session:
            session.run([v1.global_variables_initializer()])
            session.run([v1.local_variables_initializer()])
            graphs = v1.RunOptions(output_partition_graphs=True)
            metadata = v1.RunMetadata()
            session.run(train_op, options=graphs, run_metadata=metadata)
            if hasattr(x[0], "handle"):  # by which `_reads` knows a variable
                assert _reads(metadata, "x") == 1
            session.run(of_others)
            session.run(train_op)
            assert session.run(value) == 10.0 - 3.0
            session.run([train_op])
            session.run([train_op])
            assert session.run(value) == 7.0 - 7.0


def _reads(metadata, name: str) -> int:
    """Returns how many operations of a run read a server's variable, calls included."""
    count, passing = 0, {"Identity", "Switch", "Enter"}
    for graph in metadata.partition_graphs:
        nodes = {node.name: node for node in graph.node}

        def origin(tensor: str, nodes=nodes):
            node = nodes.get(tensor.partition(":")[0])
            return origin(node.input[0]) if node and node.op in passing else node

        for node in graph.node:
            origins = [origin(i) for i in node.input if node.op not in passing]
            kinds = [o.attr["shared_name"].s.decode() for o in origins if o]
            is_read = "Apply" not in node.op and node.op != "VariableShape"
            count += is_read and name in kinds
    return count


def test_rows_that_a_function_looks_up_are_not_copied():
    def loss_fn():
        table = v1.get_variable("table", [10**6, 8])
        return tf.reduce_sum(tf.function(lambda: tf.gather(table, [1, 7]))())

    with tf.Graph().as_default():
        _, window = _build(loss_fn)
        assert "table/copy" not in {v.op.name for v in window}


def test_a_copy_waits_for_the_checks_before_its_read(fresh_graph):
    x = v1.get_variable("x", initializer=3.0)
    check = tf.debugging.assert_positive(v1.placeholder_with_default(-1.0, []))
    with tf.control_dependencies([check]):
        value = x.value()
    ((use,),) = find_uses([x], [tf.square(value).op]).values()
    before = value.op.control_inputs
    assert before
    assert use.of_copy(tf.ones([])).op.control_inputs == before


def test_a_function_that_writes_a_weight_is_refused():
    def loss_fn():
        x = v1.get_variable("x", initializer=3.0)

        @tf.function
        def clipped():
            x.assign(tf.minimum(x, 1.0))
            return x**2

        return clipped()

    with tf.Graph().as_default():
        sentence = "Received: 'StatefulPartitionedCall.*reads and writes x:0. Assign"
        with pytest.raises(ValueError, match=sentence):
            _build(loss_fn)


def _assigned_before():
    """Makes a loss that reads a weight after an assignment."""
    x = v1.get_variable("x", initializer=3.0)
    with tf.control_dependencies([x.assign(tf.minimum(x, 1.0))]):
        loss = 0.5 * x.read_value() ** 2
    optimizer = v1.train.GradientDescentOptimizer(0.5)
    return [make_accumulating_train_op(loss, optimizer, 2)]


def _shared_by_two():
    """Makes two train ops over one trunk, whose windows begin at different times."""
    x, y = (v1.get_variable(n, initializer=v) for n, v in (("x", 3.0), ("y", 1.0)))
    loss, optimizer = 0.5 * (x * y) ** 2, v1.train.GradientDescentOptimizer(0.1)
    first = make_accumulating_train_op(loss, optimizer, 4)
    second = make_accumulating_train_op(2.0 * loss + x, optimizer, 2)
    return [first, second, second, second]


def _shared_by_three():
    """Makes three train ops; the third shares with the second, that with the first."""
    x, y = (v1.get_variable(n, initializer=v) for n, v in (("x", 3.0), ("y", 1.0)))
    of_x, of_y, optimizer = x**2, y**2, v1.train.GradientDescentOptimizer(0.01)
    first, second, third = (
        make_accumulating_train_op(loss, optimizer, steps)
        for loss, steps in ((of_x, 4), (of_x * of_y, 4), (of_y + 2.0 * x, 2))
    )
    return [first, second, third, third]


@pytest.mark.parametrize("make", [_assigned_before, _shared_by_two, _shared_by_three])
def test_copies_have_the_values_that_one_process_reads(tasks, make):
    def train(target: str, device) -> list:
        with tf.Graph().as_default(), v1.device(device), v1.Session(target) as session:
            v1.train.get_or_create_global_step()
            train_ops = make()
            session.run([v1.global_variables_initializer()])
            session.run([v1.local_variables_initializer()])
            for i in range(16):
                session.run(train_ops[i % len(train_ops)])
            return session.run(v1.trainable_variables())

    setter = v1.train.replica_device_setter(ps_tasks=2, worker_device=_WORKER)
    assert train(tasks["worker 0"][0].target, setter) == train("", None)


def test_the_passes_of_a_batch_share_its_pull():
    def loss_fn():
        x = v1.get_variable("x", initializer=3.0)
        rows = batch.sliced["features"] * x
        return whole_batch_loss(rows, lambda rows: tf.reduce_sum(rows) ** 2)

    with tf.Graph().as_default():
        batch = WholeBatch({"features": tf.ones([4]), "labels": None}, "mean")
        with batch.as_current():
            _build(loss_fn)
        works = batch.works
        assert [op.type for op in works.total.before] == ["AssignVariableOp"]
        assert works.total.before[0].inputs[0].op.name == "x/copy"
        passes = ancestors(
            [op for work in works.passes.values() for op in work.micro_ops]
        )
        assert not passes.keys() & {*works.total.before}


@pytest.mark.parametrize("device", [None, "/job:worker"])
def test_a_train_op_that_names_no_task_is_refused(device):
    with tf.Graph().as_default():
        with v1.device(v1.train.replica_device_setter(ps_tasks=1)):
            v1.train.get_or_create_global_step()
            loss = v1.get_variable("x", initializer=3.0) ** 2
        optimizer = v1.train.GradientDescentOptimizer(1.0)
        sentence = rf"Received: device '{device or ''}', and x:0 on /job:ps/task:0"
        with v1.device(device), pytest.raises(ValueError, match=sentence):
            make_accumulating_train_op(loss, optimizer, 2)


def test_a_train_op_of_one_task_needs_no_device(fresh_graph):
    with tf.device("/job:worker/task:1"):
        loss = v1.get_variable("x", initializer=3.0, use_resource=True) ** 2
    make_accumulating_train_op(loss, v1.train.GradientDescentOptimizer(1.0), 2)
    assert not get_windows()[0].place.is_on_worker


def test_a_strategy_that_puts_windows_on_servers_is_refused():
    """As TensorFlow's ParameterServerStrategy for Estimators does."""

    def on_server(create, **options):
        with tf.device("/job:ps/task:0"):
            return create(**options)

    with tf.Graph().as_default(), tf.variable_creator_scope(on_server):
        sentence = "x/accumulator on /job:ps/task:0, where a tf.distribute strategy"
        with pytest.raises(ValueError, match=sentence):
            _build(lambda: v1.get_variable("x", initializer=3.0) ** 2)


def test_rows_of_a_window_are_those_of_a_table(tasks):
    """A list of slices gives the sum of a table's rows, bit for bit, and is emptied."""
    random = np.random.RandomState(0)
    rows = [[3, 1, 3, 0], [1, 5, 5, 5], [2, 2, 2, 2], [4, 0, 1, 3]]
    values = random.normal(size=[4, 4, 2]).astype(np.float32)

    def train(target, device) -> np.ndarray:
        with tf.Graph().as_default(), v1.device(device):
            fed = v1.placeholder(tf.int64, [4]), v1.placeholder(tf.float32, [4, 2])
            table = v1.get_variable("rows", [6, 2], initializer=v1.ones_initializer())
            loss = tf.reduce_sum(tf.gather(table, fed[0]) * fed[1])
            v1.train.get_or_create_global_step()
            optimizer = v1.train.MomentumOptimizer(0.1, 0.9)
            train_op = make_accumulating_train_op(loss, optimizer, 2, clip_norm=0.5)
            with v1.Session(target) as session:
                session.run([v1.global_variables_initializer()])
                session.run([v1.local_variables_initializer()])
                for micro_batch in zip(rows, values, strict=True):
                    session.run(train_op, dict(zip(fed, micro_batch, strict=True)))
                return session.run(table)

    setter = v1.train.replica_device_setter(ps_tasks=2, worker_device=_WORKER)
    weights = train(tasks["worker 0"][0].target, setter)
    np.testing.assert_array_equal(weights, train("", None))


@pytest.mark.parametrize(
    ("partial_window", "words"),
    [
        ("auto", "Received: 1, so this worker has changed no weight. max_steps"),
        ("apply", None),
    ],
)
def test_a_worker_with_less_than_a_window_says_what_it_did(
    tmp_path, monkeypatch, tasks, partial_window, words, caplog
):
    estimator = _estimator(
        tmp_path, monkeypatch, tasks["chief 0"][1], partial_window=partial_window
    )
    estimator.train(_input_fn(0), max_steps=1)
    warned = [m for m in caplog.messages if m.startswith("The first update needs")]
    assert [words in message for message in warned] == [True] * (words is not None)


def test_a_window_on_a_worker_cannot_be_kept(tmp_path, monkeypatch, tasks):
    estimator = _estimator(
        tmp_path, monkeypatch, tasks["chief 0"][1], partial_window="keep"
    )
    with pytest.raises(ValueError, match="'auto' or 'apply' with parameter servers"):
        estimator.train(_input_fn(0), steps=1)


@pytest.mark.parametrize("interface", ["whole batch", "unedited"])
def test_slots_and_sums_of_a_whole_batch_are_on_the_worker(interface):
    setter = v1.train.replica_device_setter(ps_tasks=2, worker_device=_WORKER)
    with tf.Graph().as_default() as graph, v1.device(setter):
        v1.train.get_or_create_global_step()
        features = {"x": tf.ones([4, 3]), "rows": tf.zeros([4, 2], tf.int64)}
        wrapped = microbatch_model_fn(_whole_batch_model_fn, "auto")
        params = {"interface": interface}
        wrapped(features, tf.ones([4, 1]), "train", params=params)
        shared = {v.op.name for v in v1.global_variables()}
        handles = [op for op in graph.get_operations() if op.type == "VarHandleOp"]
        names = {op.device for op in handles if op.name not in shared}
        assert {tf.DeviceSpec.from_string(name).job for name in names} == {"worker"}
        assert {v.device.rpartition("/")[0] for v in v1.global_variables()} == {
            "/job:ps"
        }


def test_a_batch_needs_copies_of_weights_that_other_workers_write(monkeypatch):
    """An optimizer of one's own reads the servers with every micro-batch."""
    config = running.tf_configs("chief", "worker", "ps")[0]
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    config = tf.estimator.RunConfig()
    setter = v1.train.replica_device_setter(ps_tasks=1, worker_device=_WORKER)
    with tf.Graph().as_default(), v1.device(setter):
        v1.train.get_or_create_global_step()
        features = {"x": tf.ones([4, 3]), "rows": tf.zeros([4, 2], tf.int64)}
        wrapped = microbatch_model_fn(_whole_batch_model_fn, 2)
        params = {"interface": "unedited"}
        sentence = "Received: an optimizer of its own and 2 workers"
        with pytest.raises(ValueError, match=sentence):
            wrapped(features, tf.ones([4, 1]), "train", params=params, config=config)


def test_a_retry_that_would_undo_the_writes_of_others_is_refused():
    def model_fn(features, labels, mode):
        del labels
        seen = v1.get_variable("seen", initializer=0.0, trainable=False)
        loss = tf.reduce_mean(features * v1.get_variable("x", initializer=1.0))
        v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, seen.assign_add(1.0).op)
        optimizer = v1.train.GradientDescentOptimizer(1.0)
        train_op = make_accumulating_train_op(loss, optimizer, 1)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    setter = v1.train.replica_device_setter(ps_tasks=1, worker_device=_WORKER)
    with tf.Graph().as_default(), v1.device(setter):
        v1.train.get_or_create_global_step()
        sentence = "Received: seen on /job:ps/task:0. Use a fixed number"
        with pytest.raises(ValueError, match=sentence):
            microbatch_model_fn(model_fn, "auto")(tf.ones([4]), None, "train")
