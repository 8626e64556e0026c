"""Damaged CSV files: the program continues, or ends with one sentence, no folder."""

import itertools

import pytest

from housing_example import jobs, main
from tests.helpers.oracles import fuzzing

pytestmark = pytest.mark.once


def test_damaged_csv_is_used_or_refused(csv, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "execute", lambda job: None)
    path, numbers = tmp_path / "damaged.csv", itertools.count()
    names = ("train_csv", "train_updates", "train_batch_size")
    names += ("gradient_accumulation_steps", "output_dir")

    def damage(content: bytes) -> None:
        path.write_bytes(content)
        values = path, 5, 2, 2, tmp_path / "new" / str(next(numbers))
        main.main(["", *(f"--{n}={v}" for n, v in zip(names, values, strict=True))])

    fuzzing.check(fuzzing.damaged(csv.read_bytes()), damage, tmp_path / "new")
