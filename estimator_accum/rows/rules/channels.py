"""Rules of operations on channels, such as those of images."""

import tensorflow as tf

from estimator_accum.rows.declaration import MOMENTS_ATTRIBUTE
from estimator_accum.rows.rules.refusals import (
    ALONG,
    FIXED_BESIDE,
    PLACE,
    SIZE,
    UNLIKE,
    check_length_1,
    only_first,
    without_places,
)
from estimator_accum.rows.rules.table import rule
from estimator_accum.rows.sizes import N
from estimator_accum.rows.states import FIXED, Mixed, State


@rule(
    *("Conv2D", "Conv3D", "DepthwiseConv2dNative", "Dilation2D", "LRN"),
    *("MaxPool", "MaxPoolV2", "MaxPool3D", "AvgPool", "AvgPool3D"),
    *("ResizeBilinear", "ResizeNearestNeighbor", "ResizeBicubic", "ResizeArea"),
    *("SpaceToDepth", "DepthToSpace", "ExtractImagePatches", "MaxPoolWithArgmax"),
)
def _images(analysis, operation, states):
    state = only_first(states)
    if state.axis:
        raise Mixed(ALONG)
    has_places = operation.type == "MaxPoolWithArgmax"
    if has_places and operation.get_attr("include_batch_in_index"):
        raise Mixed(PLACE)
    return state


@rule("ImageProjectiveTransformV2", "ImageProjectiveTransformV3")
def _transforms(analysis, operation, states):
    without_places(states)
    images, transforms, *others = states
    if images.kind != "rows" or images.axis or {*others} - {FIXED}:
        raise Mixed(ALONG)
    if transforms == FIXED:  # one for all images
        check_length_1(analysis.dims(operation.inputs[1])[0])
    elif transforms != images:
        raise Mixed(UNLIKE)
    return images


@rule("DrawBoundingBoxes", "DrawBoundingBoxesV2", "CombinedNonMaxSuppression")
@rule("ExtractGlimpse", "ExtractGlimpseV2")
def _beside_images(analysis, operation, states):
    without_places(states)
    places = [0, 2] if operation.type.startswith("Extract") else [0, 1]
    rows = [states[place] for place in places]
    others = [state for i, state in enumerate(states) if i not in places]
    if rows[0] != rows[1] or rows[0].axis or {*others} - {FIXED}:
        raise Mixed(UNLIKE)
    has_noise = "noise" in operation.node_def.attr
    if has_noise and operation.get_attr("noise") != b"zero":
        raise Mixed("it draws random numbers for all examples")
    return rows[0]


@rule("MaxPoolGrad", "AvgPoolGrad", "MaxPoolGradGrad", "ResizeBilinearGrad")
def _images_back(analysis, operation, states):
    rows = [state for state in states if state.kind == "rows"]
    if any(state.axis for state in rows) or len(set(rows)) > 1:
        raise Mixed(ALONG)
    if operation.type == "AvgPoolGrad":
        return _first_size_is_n(analysis, operation.inputs[0], rows[0])
    if len(rows) < len(states):
        raise Mixed(FIXED_BESIDE)
    return rows[0]


@rule(
    "Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput"
)
def _transposed_convolution(analysis, operation, states):
    _, filters, state = states
    if filters.kind != "fixed" or state.kind != "rows" or state.axis:
        raise Mixed(ALONG)
    return _first_size_is_n(analysis, operation.inputs[0], state)


def _first_size_is_n(analysis, shape: tf.Tensor, state: State) -> State:
    value = analysis.value(shape)
    if value is None or value[0] != N * state.span:
        raise Mixed(SIZE)
    return state


@rule("BiasAdd", "BiasAddV1")
def _bias(analysis, operation, states):
    state, tensor = only_first(states), operation.inputs[0]
    has_format = "data_format" in operation.node_def.attr
    is_first = has_format and operation.get_attr("data_format") == b"NCHW"
    channels = 1 if is_first else analysis.rank(tensor) - 1
    if state.axis == channels:
        raise Mixed(FIXED_BESIDE)
    return analysis.set_dims(operation.outputs[0], state, analysis.dims(tensor))


@rule("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
def _normalization(analysis, operation, states):
    state, *others = states
    channels = 1 if operation.get_attr("data_format").startswith(b"NC") else -1
    if state.kind != "rows":
        raise Mixed(ALONG)
    if state.axis == channels % analysis.rank(operation.inputs[0]):
        # Keras's layer normalization: every row is a channel.
        of_channel = State("rows", 0, state.span)
        if any(s not in (of_channel, FIXED) for s in others) or FIXED in others[:2]:
            raise Mixed(UNLIKE)
        return [state, *[of_channel] * (len(operation.outputs) - 1)]
    is_joined = operation.get_attr("is_training")
    is_joined = is_joined and not hasattr(operation, MOMENTS_ATTRIBUTE)
    if is_joined or any(s != FIXED for s in others):
        raise Mixed("batch normalization combines the examples")
    return [state, *[FIXED] * (len(operation.outputs) - 1)]
