"""Rules of the analysis of rows: the states of an operation's outputs.

Each rule is a function of the analysis, the operation and the states of its inputs, of
which one has rows at least, and none is mixed. It raises Mixed where a result combines
examples, or may.

An operation without a rule is mixed, which is right, but computed on the whole
batch. To add one, name its type in the rule that fits (`elementwise.py` for the simplest),
or write a rule in the file of its kind. Two tests ask for a case of each type:
tests/estimator_accum/rows/test_rows.py compares the rows of the whole batch with those
of its parts, and test_attacked_rules.py tries random inputs.
"""

from estimator_accum.rows.rules import (  # noqa: F401, which add rules to the table
    along_axes,
    blocks,
    channels,
    control_flow,
    elementwise,
    entries,
    from_sizes,
    joined_lists,
    lists,
    lookups,
    partitions,
    products,
    repeats,
    row_splits,
    shapes,
    slices,
    sparse,
)
