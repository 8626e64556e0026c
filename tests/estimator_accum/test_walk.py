"""What docs/architecture.md says a reader opens for one variable after 7 micro-steps."""

import ast
import dataclasses
import pathlib
import re
import sys

import tensorflow as tf

import estimator_accum
from estimator_accum import get_windows, make_accumulating_train_op

_LIBRARY = pathlib.Path(estimator_accum.__file__).parent
_PAGE = _LIBRARY.parent / "docs" / "architecture.md"
_MOST_FILES, _MOST_LINES = 6, 1700
_MOST_RECORDS, _MOST_FIELDS = 5, 50
# Clocks are classes without fields; these two hold what a caller's code does.
_CLOCKS_AND_CODE = {"Clock", "EveryRun", "EveryKRuns", "Change"}
_LOOKS = {"Factors", "MicroStepWriters"}  # at a finished graph


def _executed_functions(function) -> dict[pathlib.Path, set[ast.FunctionDef]]:
    """Returns the library's functions that a function runs, by their file."""
    codes = set()

    def note(frame, event, argument):
        del event, argument
        codes.add(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    found = {}
    for code in codes:
        path = pathlib.Path(code.co_filename)
        if path.is_relative_to(_LIBRARY) and path.name != "__init__.py":
            found.setdefault(path, set()).add(code.co_firstlineno)
    return {path: _functions(path, lines) for path, lines in found.items()}


def _functions(path: pathlib.Path, lines: set[int]) -> set[ast.FunctionDef]:
    """Returns the outermost functions of a file that hold one of the lines."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        parts = node.body if isinstance(node, ast.ClassDef) else [node]
        for part in parts:
            if isinstance(part, ast.FunctionDef):
                first = min([part, *part.decorator_list], key=lambda each: each.lineno)
                if any(first.lineno <= line <= part.end_lineno for line in lines):
                    found.add(part)
    return found


def _train(micro_steps: int) -> float:
    variable = tf.compat.v1.get_variable("variable", initializer=0.0)
    loss = tf.square(variable - 1.0)
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.5)
    train_op = make_accumulating_train_op(loss, optimizer, 4, clip_norm=10.0)
    with tf.compat.v1.Session() as session:
        session.run(tf.compat.v1.global_variables_initializer())
        for _ in range(micro_steps):
            session.run(train_op)
        return session.run(variable)


def test_the_page_lists_the_files_of_a_variable_after_7_micro_steps(fresh_graph):
    values = []
    executed = _executed_functions(lambda: values.append(_train(7)))
    assert values == [1.0]  # one update of 0.5 * 2
    (parts,) = re.findall(
        r"After 7 micro-steps a variable is (.*?are below them)\. Four more (.*?)\.\n",
        _PAGE.read_text(),
        re.DOTALL,
    )
    deciding, checking = (set(re.findall(r"`(\w+\.py)`", part)) for part in parts)
    assert {path.name for path in executed} == deciding | checking
    assert len(deciding) <= _MOST_FILES
    functions = set().union(*(executed[p] for p in executed if p.name in deciding))
    lines = sum(each.end_lineno - each.lineno + 1 for each in functions)
    assert lines <= _MOST_LINES


def test_five_records_carry_a_train_op(fresh_graph):
    _train(0)
    (window,) = get_windows()
    records = {type(window): window._fields}
    records[type(window.result)] = window.result._fields
    records[type(window.accumulators[0])] = window.accumulators[0]._fields
    names = [field.name for field in dataclasses.fields(window.options)]
    records[type(window.options)] = names
    module = sys.modules[type(window).__module__]
    records[module.MicroBatch] = module.MicroBatch._fields
    assert len(records) <= _MOST_RECORDS
    assert sum(map(len, records.values())) <= _MOST_FIELDS
    # No other class carries values from one file of the core to the next.
    core = [
        f"estimator_accum.{path.stem}"
        for path in _LIBRARY.glob("_*.py")
        if path.stem not in ("__init__", "__main__", "_recompute", "_optimizer")
    ]
    classes = {
        kind
        for name in core
        for kind in vars(sys.modules.get(name, sys)).values()
        if isinstance(kind, type) and kind.__module__ == name
        if not kind.__name__.startswith("_")
    }
    assert {c.__name__ for c in classes - records.keys()} <= _CLOCKS_AND_CODE | _LOOKS
