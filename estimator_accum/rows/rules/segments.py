"""Rules of reductions over segments of an axis without examples."""

from estimator_accum.rows.rules.dims import keep_dims
from estimator_accum.rows.rules.refusals import ALONG, only_first
from estimator_accum.rows.rules.table import rule
from estimator_accum.rows.states import Mixed


@rule("SegmentSum", "SegmentMean", "SegmentMax", "SegmentMin", "SegmentProd")
@rule("SparseSegmentSum", "SparseSegmentMean", "SparseSegmentSqrtN")
@rule("SparseSegmentSumWithNumSegments", "SparseSegmentMeanWithNumSegments")
@rule("SparseSegmentSqrtNWithNumSegments")
def _segments(analysis, operation, states):
    state = only_first(states)
    if not state.axis:
        raise Mixed(ALONG)
    return keep_dims(analysis, operation, state, {0})


@rule("UnsortedSegmentSum", "UnsortedSegmentMax", "UnsortedSegmentMin")
@rule("UnsortedSegmentProd", "UnsortedSegmentJoin")
def _unsorted_segments(analysis, operation, states):
    state, rank = only_first(states), analysis.rank(operation.inputs[1])
    if state.axis < rank:
        raise Mixed(ALONG)
    result = state._replace(axis=state.axis - rank + 1, is_first=False)
    tail = analysis.dims(operation.inputs[0])[rank:]
    return analysis.set_dims(operation.outputs[0], result, [None, *tail])
