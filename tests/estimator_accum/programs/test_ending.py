"""Errors that end a program: one sentence, one exit code."""

import pytest
import tensorflow as tf

from estimator_accum.programs import ending

_OOM = tf.errors.ResourceExhaustedError(
    None,
    None,
    "Graph execution error:\n\n(0) OOM when allocating tensor with shape[8,12]\n\t[[x]]",
)


def _refusal(reason: Exception) -> ValueError:
    error = ValueError("One example must fit in memory.\nReceived: one.")
    error.__cause__ = reason
    return error


def _end(error: BaseException, folder, capsys) -> tuple[int, str]:
    """Returns the exit code of a program that fails, and its stderr."""
    ended = ending.ended_in_words("program", str(folder), "", is_alone=True)
    with pytest.raises(SystemExit) as exit_info, ended:
        raise error
    return exit_info.value.code, capsys.readouterr().err


_SENTENCE = (
    "program: A batch must fit in memory. Received: (0) OOM when allocating tensor with "
    "shape[8,12]. Use smaller batches; --micro_batch_size=auto finds the size of those "
    "that train.\n"
)
_REFUSED = "program: One example must fit in memory. Received: one.\n"


@pytest.mark.parametrize(
    ("error", "sentence"), [(_OOM, _SENTENCE), (_refusal(_OOM), _REFUSED)]
)
def test_lack_of_memory_is_one_sentence(error, sentence, tmp_path, capsys):
    assert _end(error, tmp_path, capsys) == (2, sentence)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("model.ckpt-5.index", "stopped. The same command resumes from the last check"),
        ("model/model.ckpt-5.index", "stopped. The same command resumes from the last"),
        ("run_settings.json", "stopped before the first checkpoint: nothing is saved"),
    ],
)
def test_ctrl_c_promises_to_resume_where_there_is_a_checkpoint(
    name, sentence, tmp_path, capsys
):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    code, said = _end(KeyboardInterrupt(), tmp_path, capsys)
    assert code == 130 and f"program: {sentence}" in said


def test_any_other_error_keeps_its_traceback(tmp_path, capsys):
    code, said = _end(_refusal(KeyError("x")), tmp_path, capsys)
    assert code == 1 and "Traceback" in said
