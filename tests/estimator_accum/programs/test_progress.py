"""Progress in damaged checkpoints."""

import contextlib
import re

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum.programs import ending, folder
from estimator_accum.programs.progress import (
    DamagedCheckpointError,
    Progress,
    ends_at,
    named_checkpoint,
    read_progress,
    read_values,
)


@pytest.fixture
def checkpoints(tmp_path):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        step = tf.compat.v1.get_variable("global_step", initializer=np.int64(3))
        tf.compat.v1.get_variable("update_step", initializer=np.int64(1))
        tf.compat.v1.get_variable("weights", initializer=np.ones([5], "f"))
        session.run(tf.compat.v1.global_variables_initializer())
        saver = tf.compat.v1.train.Saver()
        for _ in range(2):
            path = str(tmp_path / "model.ckpt")
            saver.save(session, path, step, write_meta_graph=False)
            session.run(step.assign_add(1))
    return tmp_path


def test_files_cut_at_any_byte_get_one_sentence(checkpoints):
    assert read_progress(str(checkpoints)) == Progress(4, 1, 0)
    sentence = re.compile(
        r"The last checkpoint in `--output_dir` must be whole\. Received: \S+model.ckpt-4, "
        r".* To resume from model.ckpt-3, write it as model_checkpoint_path in \S+; or "
    )
    for path in sorted(checkpoints.glob("model.ckpt-4.*")):
        content = path.read_bytes()
        for length in range(len(content)):
            path.write_bytes(content[:length])
            with pytest.raises(DamagedCheckpointError, match=sentence):
                ends_at(checkpoints, 1)
            with pytest.raises(DamagedCheckpointError, match="must be whole"):
                read_values(str(checkpoints / "model.ckpt-4"), ["weights"])
        path.write_bytes(content)
    values = read_values(str(checkpoints / "model.ckpt-4"), ["update_step", "absent"])
    assert values == {"update_step": 1}
    (checkpoints / "model.ckpt-4.data-00000-of-00001").unlink()
    with pytest.raises(DamagedCheckpointError, match=sentence):
        read_progress(str(checkpoints))


def test_damaged_rows_of_metrics_are_passed_over(tmp_path):
    rows = b"update_step,global_step,loss\n" + b"\0" * 200_000 + b'\n",1,"\n1,2,0.5\n'
    rows += b"2,4,\n\xff,6,1\n3x,6\ninf,8,1\n"
    (tmp_path / folder.METRICS).write_bytes(rows)
    assert folder.last_row(tmp_path) == {"update_step": 2, "global_step": 4}
    assert folder.update_at(tmp_path, "4") == 2
    assert folder.update_at(tmp_path, "8") is None
    (tmp_path / folder.METRICS).write_bytes(b"\xef\xbb\xbf" + rows)  # of a spreadsheet
    assert folder.update_at(tmp_path, "4") is None


def test_a_file_that_names_checkpoints_is_cut_at_any_byte(checkpoints):
    path = checkpoints / "checkpoint"
    content, last = path.read_bytes(), str(checkpoints / "model.ckpt-4")
    assert named_checkpoint(checkpoints) == last
    damaged = 0
    for length in range(len(content)):
        path.write_bytes(content[:length])
        if named_checkpoint(checkpoints) is None:
            damaged += 1
            with pytest.raises(DamagedCheckpointError, match="`checkpoint` names no"):
                read_progress(str(checkpoints))
        else:
            assert named_checkpoint(checkpoints) == last  # in whole lines
    assert damaged > 0.9 * len(content)


def test_a_checkpoint_that_is_cut_before_its_restore_ends_in_one_sentence(
    checkpoints, capsys
):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.compat.v1.get_variable("weights", [5])
        saver = tf.compat.v1.train.Saver()
        for path in sorted(checkpoints.glob("model.ckpt-4.*")):
            content = path.read_bytes()
            for length in range(0, len(content), 3):
                path.write_bytes(content[:length])
                ended = ending.ended_in_words("p", str(checkpoints), "")
                with contextlib.suppress(SystemExit), ended:
                    saver.restore(session, str(checkpoints / "model.ckpt-4"))
                    assert "data" in path.name  # behind the weights
                said = capsys.readouterr().err
                assert not said or said.startswith("p: Checkpoints must be whole. ")
            path.write_bytes(content)


def test_a_damaged_checkpoint_is_named_by_the_line_about_it(capsys):
    message = (
        "Graph execution error:\n\nDetected at node 'save/RestoreV2' defined at:\n"
        "Node: 'save/RestoreV2'\nTensorBundle at a: Checksum does not match.\n"
        "\t [[{{node save/RestoreV2}}]]\n\nOriginal stack trace for 'save/RestoreV2':"
    )
    with pytest.raises(SystemExit), ending.ended_in_words("p", "folder", ""):
        raise tf.errors.DataLossError(None, None, message)
    said = capsys.readouterr().err
    assert "Received: TensorBundle at a: Checksum does not match. If it is" in said


@pytest.mark.parametrize("damage", ["checkpoint", "model.ckpt-4.index"])
def test_a_program_that_finds_no_whole_checkpoint_ends_in_one_sentence(
    damage, checkpoints, capsys
):
    (checkpoints / damage).write_text("")
    ended = ending.ended_in_words("program", str(checkpoints), "")
    with pytest.raises(SystemExit) as exit_info, ended:
        read_progress(str(checkpoints))
    said = capsys.readouterr().err
    assert exit_info.value.code == 2 and said.count("\n") == 1
    assert said.startswith("program: ") and "se another --output_dir" in said


def test_damage_is_of_a_checkpoint_only_where_one_is_restored(checkpoints, capsys):
    data = checkpoints / "model.ckpt-4.data-00000-of-00001"
    data.write_bytes(bytes(data.stat().st_size))
    (checkpoints / "records").write_bytes(b"no records" * 9)
    seen = []
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.compat.v1.get_variable("weights", [5])
        saver = tf.compat.v1.train.Saver()
        records = tf.data.TFRecordDataset(str(checkpoints / "records"))
        record = tf.compat.v1.data.make_one_shot_iterator(records).get_next()
        for action in (
            lambda: saver.restore(session, str(checkpoints / "model.ckpt-4")),
            lambda: session.run(record),
        ):
            ended = ending.ended_in_words("p", str(checkpoints), "")
            with pytest.raises(SystemExit) as exit_info, ended:
                action()
            seen.append((exit_info.value.code, capsys.readouterr().err))
    assert seen[0][0] == 2 and seen[0][1].startswith("p: Checkpoints must be whole. ")
    assert seen[1][0] == 1 and "model_checkpoint_path" not in seen[1][1]


@pytest.mark.parametrize(
    "path", ["gs://bucket/x", "ram://x", "gs:/b", "file:///x", "~/x"]
)
def test_output_of_another_place_is_refused(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="must be a path of this machine"):
        folder.check_output_dir(path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["run[1]", "run*", "run?", "run\\1"])
def test_a_folder_that_tensorflow_takes_for_a_pattern_is_refused(
    name, tmp_path, monkeypatch
):
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    with pytest.raises(ValueError, match=r"must have no \[, \*, \? or \\ in its path"):
        folder.check_output_dir("output")
