"""Losses of unedited model_fns train in micro-batches as with the batch at once."""

import pytest
import tensorflow as tf

from estimator_accum import microbatch_model_fn
from estimator_accum.microbatch.own_optimizer import derivation
from tests.helpers.models import hidden_mixing, losses
from tests.helpers.models.examples import BATCH
from tests.helpers.models.losses import input_fn_of, model_fn_of
from tests.helpers.oracles import exactness
from tests.helpers.oracles.exactness import EQUAL, SINGLE, assert_exact
from tests.helpers.tables import rows

_MAY_BE_REFUSED = losses.EXACT_OR_REFUSED | hidden_mixing.HIDDEN

# The other rows run all lines and branches of the library that these do.
_DAILY = {
    *("mean", "sum", "sum_over_root_of_n", "rmse", "mean_of_column_rmse"),
    *("mean_and_sum", "sum_over_max_of_count_and_1", "boolean_mask_of_outputs"),
    *("count_by_size_of_selected", "two_terms_over_one_divisor"),
    *("missing_labels_by_column", "tokens_over_sum_of_lengths", "flat_tokens"),
    *("ragged_rows", "class_balanced", "standardized_advantages"),
    *("in_batch_negatives", "redundancy", "prototypes", "dice_per_class", "lovasz"),
    *("correlation", "normalized_outputs", "gram_matrix", "hard_share"),
    *("hard_negatives", "sorted_against_sorted", "of_distinct_classes"),
    *("cumulative_sum", "halves", "first_examples", "gathered_log_probability"),
    *("adversarial", "all_flattened", "area_under_curve", "balanced_experts"),
    *("boolean_mask", "by_column", "collected", "detection", "distillation"),
    *("dynamic_partition", "einsum_over_examples", "gather_of_where", "gaussian"),
    *("gradient_penalty", "hardest_triplets", "joined", "keras_auto", "keras_none"),
    *("keras_sparse", "keras_sum", "largest", "learned_weights_of_tasks"),
    *("margin_of_angles", "masked_language_model", "matmul_with_ones", "mean_and_l2"),
    *("median", "mixture_density", "nuclear_norm", "one_per_column", "one_per_example"),
    *("one_per_output", "pairs_of_one_example", "penalty_for_each_example"),
    *("penalty_of_a_mean", "penalty_of_batchs_rows", "penalty_times_loss", "quantiles"),
    *("ranking_in_groups", "ratio_of_tasks", "reshaped_as_columns"),
    *("reversed_gradient", "rolled", "selected", "shape_1", "sparse_product"),
    *("straight_through", "sum_of_list", "sum_over_unknown_time_of_means", "survival"),
    *("swish_of_tensorflow", "time_major", "time_major_matrix", "up_to_the_longest"),
    *("virtual_adversarial", "whitened", "chosen_words", "several_lists"),
    "similar_among_chosen",
}
# Losses with more than 8 % of the activations of a small network, on the whole batch:
# most of them compare examples.
_COMBINING = {
    *("examples_with_examples_by_a_bug", "similar_among_chosen"),
    *("up_to_the_longest", "sparse_values"),
    *("ragged_to_tensor", "softmax_of_weights", "class_balanced"),
    *("standardized_advantages", "in_batch_negatives", "two_views", "hardest_triplets"),
    *("area_under_curve", "ranking_in_groups", "redundancy", "prototypes", "lovasz"),
    *("correlation", "soft_histogram", "normalized_outputs", "whitened"),
    *("sorted_against_sorted", "survival", "mixed_up", "of_distinct_classes"),
    *("cumulative_sum", "rolled", "halves", "even_and_odd", "first_examples"),
    *("reshaped_as_columns", "penalty_of_batchs_rows", "penalty_of_a_mean"),
    *("adversarial", "virtual_adversarial", "ctc", "sinkhorn", "hard_examples"),
}


def _assert_split(name: str, share: float) -> None:
    assert (share > 8) == (name in _COMBINING), share


@pytest.mark.parametrize("name", rows(losses.LOSSES, _DAILY))
def test_a_loss_is_that_of_the_batch_at_once(name):
    loss = losses.LOSSES[name]
    _assert_split(name, assert_exact(model_fn_of(loss), input_fn_of(loss)))


def test_passes_that_choose_other_entries_are_refused(monkeypatch):
    add = derivation.running_sum

    def miscount(*arguments):
        before, total = add(*arguments)
        return before + 1, total

    monkeypatch.setattr(derivation, "running_sum", miscount)
    loss = losses.LOSSES["chosen_words"]
    cut_model_fn = microbatch_model_fn(model_fn_of(loss), 3)
    with pytest.raises(tf.errors.InvalidArgumentError, match="choose the same entries"):
        exactness.train(cut_model_fn, input_fn_of(loss))


@pytest.mark.parametrize("name", losses.SINGLE)
def test_a_loss_in_float32_is_that_of_the_batch_at_once(name):
    loss = losses.SINGLE[name]
    share = assert_exact(model_fn_of(loss), input_fn_of(loss), tolerance=SINGLE)
    _assert_split(name, share)


@pytest.mark.parametrize("name", losses.WITH_CONTROL_FLOW)
def test_a_loss_with_control_flow_is_that_of_the_batch_at_once(name, control_flow):
    loss = losses.WITH_CONTROL_FLOW[name]
    share = assert_exact(model_fn_of(loss), input_fn_of(loss))
    if tf.compat.v1.control_flow_v2_enabled():
        _assert_split(name, share)


_DAILY_REFUSED = {
    *("clipped_gradient", "gradient_of_the_batchs_mean", "python_over_the_batch"),
    *("python_over_more_than_8", "differentiable_python", "reordered", "repeated"),
    *("rolled_by_the_largest", "contrast_of_one_image", "weights_of_places"),
    *("least_squares", "own_noise", "axes_of_the_rank"),
    *("overridden", "other_data_beside", "annealed_inside", "renormalized"),
    *("both_ways_of_weights", "dropped_where_large", "small_ones_dropped"),
    "scaled_by_the_batch",
}


@pytest.mark.parametrize("name", rows(_MAY_BE_REFUSED, _DAILY_REFUSED))
def test_a_loss_is_exact_or_refused(name):
    loss = _MAY_BE_REFUSED[name]
    input_fn = input_fn_of(loss, drop_remainder=name == "static_batch_size")
    tolerance = SINGLE if name.startswith("contrast") else None
    exactness.assert_exact_or_refused(model_fn_of(loss), input_fn, tolerance=tolerance)


_DAILY_LOOPS = {"size_in_a_loop", "rounds_of_the_largest"}


@pytest.mark.parametrize("name", rows(hidden_mixing.WITH_CONTROL_FLOW, _DAILY_LOOPS))
def test_a_loop_that_hides_how_it_mixes_is_exact_or_refused(name, control_flow):
    loss = hidden_mixing.WITH_CONTROL_FLOW[name]
    exactness.assert_exact_or_refused(model_fn_of(loss), input_fn_of(loss))


@pytest.mark.parametrize(
    "name",
    ["mean", "sum", "boolean_mask", "one_per_example", "mean_and_l2"]
    + ["chosen_words"],
)
def test_one_micro_batch_is_the_batch_bit_for_bit(name):
    loss = losses.LOSSES[name]
    assert_exact(model_fn_of(loss), input_fn_of(loss), micro_batches=1, tolerance=EQUAL)


@pytest.mark.parametrize(
    "name",
    ["mean", "rmse", "gather_of_where", "in_batch_negatives", "rolled"]
    + ["one_per_example", "several_lists"],
)
def test_micro_batches_of_one_example(name):
    loss = losses.LOSSES[name]
    input_fn = input_fn_of(loss, drop_remainder=True)
    assert_exact(model_fn_of(loss), input_fn, micro_batches=BATCH)


@pytest.mark.parametrize("after", [{0, 1}, {0, 2}, {0, 1, 3}, {0, 2, 7}])
def test_entries_of_a_batch_that_is_retried_are_its_own(after, memory):
    memory.after = after
    loss = losses.LOSSES["several_lists"]
    assert assert_exact(model_fn_of(loss), input_fn_of(loss), ("auto",)) < 8
    assert memory.count.value == 2 ** len(after)


@pytest.fixture
def dimensions():
    """Makes sizes TensorFlow 1's `Dimension`s, as under --v1."""
    tf.compat.v1.disable_v2_tensorshape()
    yield
    tf.compat.v1.enable_v2_tensorshape()


# Together they have most types of operations of the table.
_OF_MOST_TYPES = ["sum_of_sequence_means", "matmul_with_ones", "dynamic_partition"]
_OF_MOST_TYPES += ["ragged_rows", "sparse_product", "two_views"]
_OF_MOST_TYPES += ["ranking_in_groups", "balanced_experts", "nuclear_norm"]
_OF_MOST_TYPES += ["median", "mixed_up", "halves", "detection"]
_OF_MOST_TYPES += ["penalty_of_batchs_rows", "joined", "keras_auto"]
_OF_MOST_TYPES += ["straight_through", "virtual_adversarial"]
_DAILY_DIMENSIONS = {
    *("balanced_experts", "detection", "joined", "matmul_with_ones", "median"),
    *("nuclear_norm", "penalty_of_batchs_rows", "ranking_in_groups"),
    *("straight_through", "sum_of_sequence_means", "two_views", "virtual_adversarial"),
}


@pytest.mark.once
@pytest.mark.usefixtures("dimensions")
@pytest.mark.parametrize("name", rows(_OF_MOST_TYPES, _DAILY_DIMENSIONS))
def test_a_loss_of_dimensions_is_that_of_the_batch_at_once(name):
    loss = losses.LOSSES[name]
    assert_exact(model_fn_of(loss), input_fn_of(loss))
