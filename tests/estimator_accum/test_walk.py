"""Files of one variable after 7 micro-steps, as docs/architecture.md lists them."""

import pathlib
import re
import sys

import tensorflow as tf

import estimator_accum
from estimator_accum import make_accumulating_train_op

_LIBRARY = pathlib.Path(estimator_accum.__file__).parent
_PAGE = _LIBRARY.parent / "docs" / "architecture.md"


def _executed_files(function) -> set[str]:
    """Returns the library's files whose functions a function runs."""
    names = set()

    def note(frame, event, argument):
        del event, argument
        names.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    paths = [pathlib.Path(name) for name in names]
    return {
        str(path.relative_to(_LIBRARY))
        for path in paths
        if path.is_relative_to(_LIBRARY) and path.name != "__init__.py"
    }


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
    executed = _executed_files(lambda: values.append(_train(7)))
    assert values == [1.0]  # one update of 0.5 * 2
    section = _PAGE.read_text().split("## Files of one variable")[1].split("\n## ")[0]
    listed = re.findall(r"`(\w+/\w+\.py)`", section)
    assert sorted(listed) == sorted(executed)
