"""Rules of the analysis under attack: random inputs, of which one example changes.

Each type of operation is attacked until its rule claims something. To attack them
more often than the suite does:

    python -m pytest tests/estimator_accum/rows/test_attacked_rules.py \\
        --attacks=20000
"""

import collections

import pytest
from tensorflow import raw_ops as raw

from estimator_accum.rows.integers import OF_SHAPE
from estimator_accum.rows.rules.from_sizes import FROM_SIZES
from estimator_accum.rows.rules.table import (
    RULES,
    RULES_OF_ENTRIES,
    RULES_OF_MIXED,
    RULES_OF_SPLITS,
)
from tests.helpers.oracles.attacked_rules import attack
from tests.helpers.oracles.rule_inputs import (
    MAKERS,
    blocks_of_rows,
    numbers_of_entries,
    ragged_tensors,
    rounds_of_examples,
    some_sizes,
)

# The parts of a loop or TensorArray of TensorFlow 1, which the rest cannot be without,
# names of operations that are others' under a second name, and those of GPUs alone.
_NOT_ALONE = {"Enter", "NextIteration", "RefEnter", "RefIdentity", "LookupTableFind"}
_NOT_ALONE |= {"CudnnRNNV3"}
_MARKS = (pytest.mark.daily, pytest.mark.once, pytest.mark.slow)
_MOST_TRIES = 60  # for a type of operation, until its rule claims something


def _kinds() -> list[str]:
    return sorted(kind for kind in MAKERS if hasattr(raw, kind) or "Call" in kind)


def test_every_type_of_operation_with_a_rule_is_attacked():
    kinds = RULES.keys() | RULES_OF_ENTRIES.keys() | OF_SHAPE | FROM_SIZES
    kinds |= RULES_OF_SPLITS.keys() | RULES_OF_MIXED.keys()
    kinds = {kind for kind in kinds if hasattr(raw, kind)}
    kinds = {kind for kind in kinds if not kind.startswith("TensorArray")}
    assert kinds - MAKERS.keys() <= _NOT_ALONE


@pytest.mark.parametrize("number", [0, pytest.param(4000, marks=_MARKS)])
def test_no_row_is_of_another_example(number, request):
    kinds, number = _kinds(), max(number, request.config.getoption("--attacks"))
    tally, findings = collections.defaultdict(collections.Counter), []
    waiting = dict.fromkeys(kinds)  # of which nothing was claimed yet
    for seed in range(max(number, _MOST_TRIES * len(kinds))):
        kind = kinds[seed % len(kinds)]
        if seed >= number and kind not in waiting:
            continue
        outcome = attack(kind, MAKERS[kind], seed)
        tally[kind] += outcome.kinds
        findings += outcome.findings
        if outcome.kinds.keys() - {"mixed", "impossible"}:
            waiting.pop(kind, None)
    total = sum(tally.values(), collections.Counter())
    print(f"{len(kinds)} types of operations: {dict(total)}")
    assert not findings, "\n".join(findings)
    assert not waiting


@pytest.mark.parametrize(
    "make",
    [
        *(some_sizes, numbers_of_entries, blocks_of_rows, rounds_of_examples),
        ragged_tensors,
    ],
    ids=lambda make: make.__name__,
)
def test_results_of_several_operations_are_those_of_their_examples(make, request):
    findings = []
    for seed in range(12 + request.config.getoption("--attacks") // 10):
        findings += attack(make.__name__, make, seed).findings
    assert not findings, "\n".join(findings)
