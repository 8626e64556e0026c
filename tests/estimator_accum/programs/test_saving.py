"""The start of a program's session."""

import types

import pytest
import tensorflow as tf
from tensorflow.python.client.session import BaseSession
from tensorflow.python.training.saving import saveable_object

from estimator_accum import make_accumulating_train_op, make_accumulation_hooks
from estimator_accum.programs.job import make_estimator
from estimator_accum.programs.saving import _FirstCheckpointListener, make_saver_hooks

v1 = tf.compat.v1


def _input_fn():
    return tf.data.Dataset.from_tensors((tf.ones([1]), tf.ones([1]))).repeat(6)


def _model_fn(features, labels, mode, config):
    weight = tf.compat.v1.get_variable("weight", [1])
    loss = tf.reduce_mean(tf.square(weight * features - labels))
    optimizer = tf.compat.v1.train.AdamOptimizer(0.1)
    hooks = make_accumulation_hooks(metrics_dir=config.model_dir)
    return tf.estimator.EstimatorSpec(
        mode,
        loss=loss,
        train_op=make_accumulating_train_op(loss, optimizer, 2),
        training_hooks=[*hooks, *make_saver_hooks(config)],
    )


@pytest.fixture
def fetched(tmp_path, monkeypatch) -> list[tuple]:
    """Fetches of all runs of a training with 6 micro-steps, as names."""
    run, names = BaseSession._do_run, []

    def record(self, handle, targets, fetches, *args):
        names.append(tuple(tensor.name for tensor in [*targets, *fetches]))
        return run(self, handle, targets, fetches, *args)

    monkeypatch.setattr(BaseSession, "_do_run", record)
    settings = types.SimpleNamespace(seed=1, strategy="none", precision="float32")
    estimator = make_estimator(_model_fn, settings, tmp_path, 4, is_auto=False)
    estimator.train(_input_fn)
    return names


def test_all_micro_steps_fetch_the_same(fetched):
    """For a session, each further set of fetches is a graph to optimize: seconds."""
    steps = [names for names in fetched if "accumulation_train" in names]
    assert len(steps) == 7  # the last one finds the end of the data
    assert len(set(steps)) == 1


@pytest.mark.usefixtures("fetched")
def test_the_checkpoint_of_update_0_is_removed_once_there_are_two_others(tmp_path):
    state = v1.train.get_checkpoint_state(str(tmp_path))
    kept = [f"{tmp_path}/model.ckpt-{n}" for n in (4, 6)]
    assert list(state.all_model_checkpoint_paths) == kept
    assert sorted(map(str, tmp_path.glob("model.ckpt-*.index"))) == [
        f"{path}.index" for path in kept
    ]


@pytest.mark.parametrize("later", [[], ["/run/model.ckpt-4"]])
def test_an_evaluator_can_read_the_checkpoint_of_update_0_while_the_next_is_saved(
    later,
):
    paths = ["/run/model.ckpt-0", *later]
    forgotten = []
    saver = types.SimpleNamespace(
        last_checkpoints=paths, recover_last_checkpoints=forgotten.append
    )
    graph = types.SimpleNamespace(get_collection=lambda name: [saver])
    listener = _FirstCheckpointListener("/run")
    listener.before_save(types.SimpleNamespace(graph=graph), 8)
    assert forgotten == ([later] if later else [])


class _Counted(saveable_object.SaveableObject):
    """A value whose reading is counted, as that of replicas' sums takes all tasks."""

    def __init__(self):
        self.reads = 0
        value = tf.numpy_function(self._read, [], tf.int64, stateful=True)
        spec = saveable_object.SaveSpec(value, "", "value", tf.int64)
        super().__init__(value, [spec], "value")

    def _read(self):
        self.reads += 1
        return self.reads

    def restore(self, restored_tensors, restored_shapes):
        return tf.no_op()


def test_a_task_that_is_not_to_save_reads_and_writes_nothing(tmp_path):
    strategy = types.SimpleNamespace(
        extended=types.SimpleNamespace(should_checkpoint=False)
    )
    config = types.SimpleNamespace(is_chief=False, train_distribute=strategy)
    with tf.Graph().as_default():
        v1.get_variable("weight", [1], use_resource=True)
        counted = _Counted()
        v1.add_to_collection(v1.GraphKeys.SAVEABLE_OBJECTS, counted)
        assert make_saver_hooks(config) == make_saver_hooks(config) == []
        scaffold = v1.train.Scaffold().finalize()
        with v1.Session() as session:
            session.run(scaffold.init_op)
            scaffold.saver.save(session, str(tmp_path / "model.ckpt"), global_step=1)
    assert counted.reads == 1 and not list(tmp_path.iterdir())


def test_a_worker_of_parameter_servers_saves_nothing():
    facts = {"is_chief": False, "train_distribute": None, "save_checkpoints_steps": 1}
    assert make_saver_hooks(types.SimpleNamespace(**facts)) == []


def test_graph_is_in_the_events_and_beside_checkpoints_but_no_text(tmp_path, fetched):
    names = {path.name for path in tmp_path.iterdir()}
    assert {f"model.ckpt-{step}.meta" for step in (4, 6)} <= names
    assert "graph.pbtxt" not in names
    (events,) = tmp_path.glob("events*")
    graphs = [
        e for e in tf.compat.v1.train.summary_iterator(str(events)) if e.graph_def
    ]
    assert len(graphs) == 1
