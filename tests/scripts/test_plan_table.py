"""scripts/benchmarks/plan_table.py: the planner compared with encoders in training."""

import csv

import pytest

from scripts.benchmarks import plan_table


# Two of the four encoders, each in a process that is started anew for its allocator.
@pytest.mark.slow
@pytest.mark.once
@pytest.mark.parametrize(
    ("encoder", "dropout", "recompute", "shapes"),
    [
        ("tiny", True, False, [(8, 64), (16, 128)]),
        ("mini", True, True, [(32, 128)]),
    ],
)
def test_planned_peaks_are_within_15_percent_of_measured_ones(
    encoder, dropout, recompute, shapes
):
    rows = plan_table._compare(encoder, dropout, recompute, shapes)
    expected = [(encoder, *shape, dropout, recompute) for shape in shapes]
    assert [row[:5] for row in rows] == expected
    for *_, planned_mb, measured_mb, ratio in rows:
        assert 0.85 <= planned_mb / measured_mb <= 1.15
        assert ratio == pytest.approx(planned_mb / measured_mb, rel=0.02)


@pytest.mark.parametrize(("share", "code"), [(0.9, 0), (1.2, 1), (0.8, 1)])
def test_peak_that_is_off_by_more_than_15_percent_is_exit_code_1(
    share, code, tmp_path, monkeypatch
):
    def measure(encoder, dropout, recompute, shapes):
        sizes = plan_table.make_config(encoder, dropout)
        options = {"is_accumulating": True, "is_recomputed": recompute}
        plans = [plan_table.memory_of(sizes, *shape, **options) for shape in shapes]
        return [plans[0].peak / share, *(plan.peak for plan in plans[1:])]

    monkeypatch.setattr(plan_table, "_measure_in_process", measure)
    table = tmp_path / "plan.csv"
    flags = ["--encoders", "tiny", "mini", "--shapes", "8x64", "64x128"]
    assert plan_table.main([*flags, f"--csv={table}"]) == code
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert len(rows) == 16
    assert [float(row["planned_over_measured"]) for row in rows] == [share, 1] * 8
