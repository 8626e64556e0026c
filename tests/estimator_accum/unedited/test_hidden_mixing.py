"""Hidden combinations of examples are exact in micro-batches, or refused."""

import pytest

from tests.helpers.models.examples import make_dataset
from tests.helpers.models.hidden_mixing import HIDDEN, WITH_CONTROL_FLOW
from tests.helpers.models.losses import features_of, model_fn_of
from tests.helpers.oracles.exactness import SINGLE, assert_exact_or_refused


def _input_fn(loss):
    return lambda: make_dataset(features_of(loss))


@pytest.mark.parametrize("name", HIDDEN)
def test_a_loss_that_hides_how_it_mixes_is_exact_or_refused(name):
    tolerance = SINGLE if name.startswith("contrast") else None
    loss = HIDDEN[name]
    assert_exact_or_refused(model_fn_of(loss), _input_fn(loss), tolerance=tolerance)


@pytest.mark.parametrize("name", WITH_CONTROL_FLOW)
def test_a_loop_that_hides_how_it_mixes_is_exact_or_refused(name, control_flow):
    loss = WITH_CONTROL_FLOW[name]
    assert_exact_or_refused(model_fn_of(loss), _input_fn(loss))
