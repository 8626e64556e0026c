"""Rules of the analysis under attack: random inputs, of which one example changes.

To attack them more often than the suite does:

    python -m pytest tests/estimator_accum/rows/test_attacked_rules.py \\
        --attacks=20000
"""

import collections

import pytest
from tensorflow import raw_ops as raw

from estimator_accum.rows.integers import OF_SHAPE
from estimator_accum.rows.rules.from_sizes import FROM_SIZES
from estimator_accum.rows.rules.table import RULES, RULES_OF_ENTRIES
from tests.helpers.oracles.attacked_rules import attack
from tests.helpers.oracles.rule_inputs import (
    MAKERS,
    blocks_of_rows,
    numbers_of_entries,
    rounds_of_examples,
    some_sizes,
)

# The parts of a loop or TensorArray of TensorFlow 1, which the rest cannot be without,
# and names of operations that are others' under a second name.
_NOT_ALONE = {"Enter", "NextIteration", "RefEnter", "RefIdentity", "LookupTableFind"}


def _kinds() -> list[str]:
    return sorted(kind for kind in MAKERS if hasattr(raw, kind) or "Call" in kind)


def test_every_type_of_operation_with_a_rule_is_attacked():
    kinds = RULES.keys() | RULES_OF_ENTRIES.keys() | OF_SHAPE | FROM_SIZES
    kinds = {kind for kind in kinds if hasattr(raw, kind)}
    kinds = {kind for kind in kinds if not kind.startswith("TensorArray")}
    assert kinds - MAKERS.keys() <= _NOT_ALONE


def test_no_row_is_of_another_example(request):
    kinds, number = _kinds(), request.config.getoption("--attacks")
    tally, findings = collections.defaultdict(collections.Counter), []
    for seed in range(number):
        kind = kinds[seed % len(kinds)]
        outcome = attack(kind, MAKERS[kind], seed)
        tally[kind] += outcome.kinds
        findings += outcome.findings
    total = sum(tally.values(), collections.Counter())
    print(f"{len(kinds)} types of operations: {dict(total)}")
    assert not findings, "\n".join(findings)
    if number >= 10 * len(kinds):  # else some have not been drawn often enough
        blind = {
            kind for kind in kinds if not tally[kind].keys() - {"mixed", "impossible"}
        }
        assert not blind


@pytest.mark.parametrize(
    "make",
    [some_sizes, numbers_of_entries, blocks_of_rows, rounds_of_examples],
    ids=lambda make: make.__name__,
)
def test_results_of_several_operations_are_those_of_their_examples(make, request):
    findings = []
    for seed in range(request.config.getoption("--attacks") // 10):
        findings += attack(make.__name__, make, seed).findings
    assert not findings, "\n".join(findings)
