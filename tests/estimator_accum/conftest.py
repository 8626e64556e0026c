"""Fixtures shared by several test files."""

import pytest
import tensorflow as tf

from tests.helpers.models.keras_kinds import kind
from tests.helpers.models.memory_errors import memory

__all__ = ["kind", "memory"]


@pytest.fixture
def fresh_graph():
    with tf.Graph().as_default():
        yield


@pytest.fixture(params=["v2", "v1"])
def control_flow(request):
    was_v2 = tf.compat.v1.control_flow_v2_enabled()
    if request.param == "v1":
        tf.compat.v1.disable_control_flow_v2()
    yield request.param
    if was_v2:
        tf.compat.v1.enable_control_flow_v2()
