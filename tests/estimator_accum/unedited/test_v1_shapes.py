"""Unedited model_fns where sizes are TensorFlow 1's `Dimension`s, as under --v1."""

import pytest
import tensorflow as tf

from tests.helpers.models import losses
from tests.helpers.models.examples import make_dataset
from tests.helpers.models.losses import features_of, model_fn_of
from tests.helpers.oracles.exactness import assert_exact

pytestmark = pytest.mark.usefixtures("graph_optimizer")
# Every third of them: they go through most of the rules.
_SOME = [*losses.LOSSES][::3]


@pytest.fixture(autouse=True)
def dimensions():
    tf.compat.v1.disable_v2_tensorshape()
    yield
    tf.compat.v1.enable_v2_tensorshape()


@pytest.mark.parametrize("name", _SOME)
def test_a_loss_is_that_of_the_batch_at_once(name):
    loss = losses.LOSSES[name]
    assert_exact(model_fn_of(loss), lambda: make_dataset(features_of(loss)))
