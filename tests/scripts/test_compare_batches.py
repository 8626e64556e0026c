"""The comparison of accumulated and whole batches, on a tiny BERT."""

import pathlib
import re
import subprocess
import sys

import pytest

_SCRIPTS = pathlib.Path(__file__).parent.parent.parent / "scripts"
sys.path.append(str(pathlib.Path(__file__).parent.parent / "bert_finetune"))


@pytest.mark.slow
@pytest.mark.parametrize(("tolerance", "code"), [("1e-5", 0), ("0", 1)])
def test_the_difference_is_printed_and_judged(tmp_path, tolerance, code):
    from tiny_bert import write_bert, write_cola

    write_bert(tmp_path / "bert")
    write_cola(tmp_path / "cola")
    done = subprocess.run(
        [
            sys.executable,
            _SCRIPTS / "compare_batches.py",
            f"--data_dir={tmp_path / 'cola'}",
            f"--bert_dir={tmp_path / 'bert'}",
            f"--output_dir={tmp_path / 'output'}",
            "--updates=4",
            "--micro_batch_size=3",
            "--max_seq_length=16",
            f"--tolerance={tolerance}",
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stderr
    found = re.search(r"largest relative weight difference: (\S+)\n$", done.stdout)
    assert 0 < float(found[1]) < 1e-5


def test_an_output_folder_with_content_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    done = subprocess.run(
        [
            sys.executable,
            _SCRIPTS / "compare_batches.py",
            "--data_dir=x",
            "--bert_dir=y",
            f"--output_dir={tmp_path}",
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "--output_dir must be new or empty. Received:" in done.stderr
