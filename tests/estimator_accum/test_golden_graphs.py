"""Graphs are those that were recorded, node for node; so are exact weights.

After an intended change: python -m pytest tests/estimator_accum/test_golden_graphs.py
--record-graphs, on each TensorFlow of the file.
"""

import json
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.models import interfaces
from tests.helpers.oracles import golden_graphs

v1 = tf.compat.v1
_FILE = pathlib.Path(golden_graphs.__file__).with_suffix(".json")
_VERSION = tf.__version__.rpartition(".")[0]


@pytest.fixture(scope="module")
def recorded(request):
    """Digests by configuration, of this TensorFlow; those noted are kept if asked."""
    digests = json.loads(_FILE.read_text())
    if request.config.getoption("record_graphs"):
        digests[_VERSION] = noted = {}
        yield noted
        _FILE.write_text(json.dumps(digests, indent=1, sort_keys=True) + "\n")
    elif _VERSION in digests:
        yield digests[_VERSION]
    else:
        pytest.skip(f"no graphs of TensorFlow {_VERSION} are recorded in {_FILE.name}")


# A change of the code changes them on the reference, too, where all of them are made.
@pytest.mark.parametrize("name", golden_graphs.CONFIGURATIONS)
def test_a_graph_is_the_recorded_one(name, recorded, request):
    digest = golden_graphs.digest(golden_graphs.CONFIGURATIONS[name])
    if request.config.getoption("record_graphs"):
        recorded[name] = digest
    assert recorded.get(name) == digest


@pytest.mark.core
@pytest.mark.parametrize("interface", interfaces.ALL)
def test_weights_of_exact_numbers_are_the_written_ones(interface):
    """All numbers are multiples of powers of 2, so no processor rounds them."""
    with tf.Graph().as_default():
        (gradient,), (variable,), loss = interfaces.fed_gradients([1.0, -2.0])
        optimizer = v1.train.MomentumOptimizer(0.5, 0.5)
        train_op = interface(loss, optimizer, 4)
        feeds = [{gradient: [i % 4, 3 - i]} for i in range(12)]
        values = interfaces.after_each(train_op, feeds, variable)
    expected = [[1.0, -2.0]] * 3 + [[0.25, -2.75]] * 4 + [[-0.875, -1.875]] * 4
    np.testing.assert_array_equal(values, [*expected, [-2.1875, 1.8125]])
