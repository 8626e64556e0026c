"""Random inputs for each type of operation that has a rule, for attacks on the rule."""

from collections.abc import Callable

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from estimator_accum.rows.rules.elementwise import ELEMENTWISE
from tests.helpers.oracles.attacked_rules import Attack

v1, raw = tf.compat.v1, tf.raw_ops
MAKERS: dict[str, Callable] = {}


def _for(*kinds: str):
    """Makes a function of an attack and a type the maker of operations of the types."""

    def register(function):
        for kind in kinds:
            MAKERS[kind] = lambda a, kind=kind: function(a, kind)
        return function

    return register


def _call(kind: str, **arguments):
    """Calls a raw operation with those of `arguments` that it takes."""
    definition = op_def_registry.get(kind)
    names = {arg.name for arg in (*definition.input_arg, *definition.attr)}
    return getattr(raw, kind)(**{k: v for k, v in arguments.items() if k in names})


# Element by element.

NEEDED = {  # attributes that an operation has no default for
    "Bucketize": {"boundaries": [0.2, 0.4]},
    "CheckNumerics": {"message": ""},
    "CheckNumericsV2": {"message": ""},
    "StringToHashBucket": {"num_buckets": 5},
    "StringToHashBucketFast": {"num_buckets": 5},
    "StringToHashBucketStrong": {"num_buckets": 5, "key": [1, 2]},
    "StaticRegexReplace": {"pattern": "a", "rewrite": "b"},
    "StaticRegexFullMatch": {"pattern": "a.*"},
    "Cast": {"DstT": tf.int32},
    "UnicodeTranscode": {"input_encoding": "UTF-8", "output_encoding": "UTF-8"},
}
_SCALARS = {
    "RegexReplace": {"pattern": "a", "rewrite": "b"},
    "RegexFullMatch": {"pattern": "a"},
    "FakeQuantWithMinMaxVars": {"min": -1.0, "max": 1.0},
}
_DTYPES = (tf.float32, tf.int32, tf.bool, tf.string, tf.complex64)
_DTYPE_OF = {}  # types of elements that an operation takes, by its type


def _of_elements(a: Attack, kind: str):
    scalars = _SCALARS.get(kind, {})
    definition = op_def_registry.get(kind)
    names = [arg.name for arg in definition.input_arg if arg.name not in scalars]
    has_list = any(arg.number_attr for arg in definition.input_arg)
    if kind not in _DTYPE_OF:
        _DTYPE_OF[kind] = _dtype_of(kind, names, scalars, has_list)
    dtype = _DTYPE_OF[kind]
    shape = a.shape(int(a.chance.integers(1, 4)))
    if a.happens(0.7):  # an axis of examples
        shape[a.chance.integers(len(shape))] = a.examples
    tensors = [_broadcast(a, shape, dtype) for _ in (names if not has_list else "12")]
    return _elements(kind, names, tensors, scalars, has_list)


def _broadcast(a: Attack, shape: list[int], dtype) -> tf.Tensor:
    lengths = [1 if a.happens(0.15) else length for length in shape]
    return a.any(
        lengths[int(a.chance.integers(len(lengths))) if a.happens(0.3) else 0 :], dtype
    )


def _elements(kind, names, arguments, scalars, has_list):
    arguments = (
        {names[0]: arguments} if has_list else dict(zip(names, arguments, strict=True))
    )
    needed = {**scalars, **NEEDED.get(kind, {})}
    if kind == "AccumulateNV2":
        needed["shape"] = arguments[names[0]][0].shape
    return getattr(raw, kind)(**arguments, **needed)


def _dtype_of(kind, names, scalars, has_list):
    for dtype in _DTYPES:
        with tf.Graph().as_default():
            try:
                tensors = [
                    tf.zeros([2], dtype) for _ in (names if not has_list else "12")
                ]
                _elements(kind, names, tensors, scalars, has_list)
                return dtype
            except (TypeError, ValueError):
                continue
    raise AssertionError(f"{kind} takes none of {_DTYPES}")


for _kind in (*ELEMENTWISE, "Cast"):
    if hasattr(raw, _kind):
        _for(_kind)(_of_elements)


@_for("Add", "AddV2", "Sub", "Mul")
def _arithmetic(a, kind):
    if a.happens(0.6):
        return _of_elements(a, kind)
    places = a.places(a.length(), a.shape(1), a.happens())
    other = a.any(a.shape(a.one_of(0, 1, 2)), tf.int32)
    if a.happens():
        other = a.one_of(tf.ones_like(other), tf.fill(tf.shape(other), a.length()))
    return getattr(raw, kind)(x=places, y=other)


@_for("Substr")
def _part_of_text(a, kind):
    shape, texts = a.shape(2), a.any(a.shape(2), tf.string)
    bounds = {"pos": a.any(shape, tf.int32), "len": a.any(shape, tf.int32)}
    return raw.Substr(input=tf.strings.join([texts, "abc"]), **bounds)


@_for("Select")
def _select(a, kind):
    shape = a.shape(2)
    condition = shape[: a.one_of(0, 1, 2)]
    return raw.Select(
        condition=a.any(condition, tf.bool), x=a.any(shape), y=a.any(shape)
    )


@_for("Print")
def _print(a, kind):
    return raw.Print(input=a.any(a.shape(2)), data=[a.any(a.shape(1))], first_n=0)


@_for("Identity", "StopGradient", "DebugIdentityV2", "EnsureShape")
def _same(a, kind):
    shape = [None if a.happens() else length for length in a.shape(2)]
    dtype = a.one_of(tf.int32, tf.float32)
    return _call(kind, input=a.any(a.shape(2), dtype), shape=shape)


@_for("PlaceholderWithDefault")
def _default(a, kind):
    return raw.PlaceholderWithDefault(input=a.any(a.shape(2)), shape=[None, None])


@_for("IdentityN")
def _each(a, kind):
    return raw.IdentityN(input=[a.any(a.shape(2)), a.any(a.shape(1), tf.int32)])


@_for("LookupTableFindV2")
def _look_up(a, kind):
    keys, values = tf.constant(["1", "aab"]), tf.constant([3, 5], tf.int64)
    initializer = tf.lookup.KeyValueTensorInitializer(keys, values)
    return tf.lookup.StaticHashTable(initializer, 0).lookup(
        a.any(a.shape(2), tf.string)
    )


# Along axes.


def _axis(a: Attack, rank: int, number: int | None = None):
    """Returns an axis, or a list of some."""
    if number is None:
        return int(a.chance.integers(-rank, rank))
    return sorted(a.chance.permutation(rank)[:number].tolist())


def _tensor(a: Attack, ranks, dtype=tf.float32, **options):
    """Returns a tensor, mostly with rows, and its rank."""
    rank = a.one_of(*ranks)
    if a.happens(0.1):
        return a.any(a.shape(rank), dtype, **options), rank
    span = a.one_of(1, 1, 1, 2)
    return a.rows(a.shape(rank - 1), dtype, None, span, **options), rank


@_for("Sum", "Mean", "Max", "Min", "Prod", "EuclideanNorm", "All", "Any", "ReduceJoin")
def _reduce(a, kind):
    dtypes = {"All": tf.bool, "Any": tf.bool, "ReduceJoin": tf.string}
    tensor, rank = _tensor(a, (1, 2, 3), dtypes.get(kind, tf.float32))
    axes = tf.constant(_axis(a, rank, int(a.chance.integers(rank + 1))), tf.int32)
    if kind == "ReduceJoin":
        return raw.ReduceJoin(
            inputs=tensor, reduction_indices=axes, keep_dims=a.happens()
        )
    return getattr(raw, kind)(input=tensor, axis=axes, keep_dims=a.happens())


@_for("ApproxTopK")
def _largest(a, kind):
    tensor, rank = _tensor(a, (1, 2, 3))
    axis = a.one_of(-1, -1, _axis(a, rank))
    return raw.ApproxTopK(input=tensor, k=1, reduction_dimension=axis)


@_for("Cross")
def _cross_product(a, kind):
    shape = [*a.shape(a.one_of(1, 2)), 3]
    return raw.Cross(a=a.any(shape), b=a.any(shape))


@_for("LowerBound", "UpperBound")
def _search(a, kind):
    number = a.one_of(1, a.examples)
    table = a.any([number, a.length()], plus=lambda rows: np.sort(rows))
    return getattr(raw, kind)(sorted_inputs=table, values=a.any([number, a.length()]))


@_for("DenseBincount")
def _counts(a, kind):
    shape = a.shape(a.one_of(1, 2, 2, 2))
    weights = a.one_of(tf.zeros([0]), a.any(shape), a.any(shape[:1]))
    return raw.DenseBincount(
        input=a.any(shape, tf.int32),
        size=a.one_of(3, _clamped_size(a)),
        weights=weights,
        binary_output=a.happens(),
    )


def _clamped_size(a: Attack) -> tf.Tensor:
    """Returns a size between bounds that leave a choice, or none."""
    size = tf.reduce_max(a.rows([], tf.int32))
    bounds = a.one_of((3, 3), (3, 4), (2, 3), (3, 2))
    if a.happens():
        return tf.minimum(bounds[0], tf.maximum(bounds[1], size))
    return tf.maximum(tf.minimum(size, bounds[0]), bounds[1])


@_for("ArgMax", "ArgMin")
def _best(a, kind):
    tensor, rank = _tensor(a, (1, 2, 3))
    return getattr(raw, kind)(input=tensor, dimension=_axis(a, rank))


@_for("Cumsum", "Cumprod", "CumulativeLogsumexp")
def _scan(a, kind):
    tensor, rank = _tensor(a, (1, 2, 3))
    return _call(kind, x=tensor, axis=_axis(a, rank), reverse=a.happens())


@_for("ReverseV2", "Roll")
def _moved(a, kind):
    tensor, rank = _tensor(a, (1, 2, 3))
    axes = _axis(a, rank, 1)
    return _call(kind, tensor=tensor, input=tensor, axis=axes, shift=[a.length()])


@_for("Softmax", "LogSoftmax", "TopKV2", "MatrixDiag")
def _last(a, kind):
    tensor, _ = _tensor(a, (1, 2, 3))
    return _call(kind, logits=tensor, input=tensor, diagonal=tensor, k=1)


@_for("MatrixDiagV2", "MatrixDiagV3")
@_for("MatrixDiagPart", "MatrixDiagPartV2", "MatrixDiagPartV3")
def _diagonals(a, kind):
    tensor, _ = _tensor(a, (2, 3, 4))
    k = a.one_of(0, 0, 1, [0, 1])
    names = {"num_rows": -1, "num_cols": -1, "padding_value": 0.0}
    return _call(kind, input=tensor, diagonal=tensor, k=k, **names)


def _regular(rows: np.ndarray) -> np.ndarray:
    """Adds to the diagonal, for each number by itself."""
    if rows.ndim < 2 or rows.shape[-1] != rows.shape[-2]:
        return rows
    return rows + 9 * np.eye(rows.shape[-1], dtype=rows.dtype)


def _matrices(a: Attack):
    rank, size = a.one_of(2, 3, 4), a.length()
    shape = [*a.shape(rank - 2), size, size]
    if a.happens(0.7) and rank > 2:
        shape[int(a.chance.integers(rank - 2))] = a.examples
    return a.any(shape, tf.float32, plus=_regular)


@_for("MatrixBandPart", "Cholesky", "MatrixInverse", "MatrixDeterminant", "Svd", "Qr")
@_for("LogMatrixDeterminant", "SelfAdjointEigV2")
def _matrix(a, kind):
    return _call(kind, input=_matrices(a), num_lower=1, num_upper=0)


@_for("FFT", "IFFT", "RFFT", "IRFFT")
@_for("FFT2D", "IFFT2D", "RFFT2D", "IRFFT2D")
@_for("FFT3D", "IFFT3D", "RFFT3D", "IRFFT3D")
def _spectrum(a, kind):
    dtype = tf.float32 if kind.startswith("RFFT") else tf.complex64
    number = int(kind[-2]) if kind.endswith("D") else 1
    tensor, _ = _tensor(a, range(number, number + 3), dtype)
    return _call(kind, input=tensor, fft_length=[2] * number)


@_for("MatrixSolve", "MatrixTriangularSolve")
def _solve(a, kind):
    matrix = _matrices(a)
    size = matrix.shape.as_list()[-1] or a.examples
    rank = matrix.shape.rank + a.one_of(0, 0, 0, -1, 1)
    shape = [a.one_of(a.examples, a.examples, 1) for _ in range(max(rank - 2, 0))]
    return getattr(raw, kind)(matrix=matrix, rhs=a.any([*shape, size, a.length()]))


@_for("MatrixSetDiag", "MatrixSetDiagV3")
def _set_diagonal(a, kind):
    size = a.length()
    shape = [*[a.examples for _ in range(a.one_of(0, 1, 2))], size, size]
    arguments = {"input": a.any(shape), "diagonal": a.any(shape[:-1])}
    return _call(kind, **arguments, k=0)


# Images.


def _images(a: Attack, rank: int = 4, channels: int = 2, span: int | None = None):
    shape = [4] * (rank - 2) + [channels]
    axis = 0 if a.happens(0.8) else None
    return a.rows(shape, axis=axis, span=span or a.one_of(1, 1, 2))


def _images_beside(a: Attack, channels: int = 2):
    """Returns images, and mostly their number."""
    span = a.one_of(1, 1, 2)
    number = a.examples * (span if a.happens(0.8) else a.one_of(1, 2))
    return _images(a, channels=channels, span=span), number


_WINDOW = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "VALID"}
_WINDOW_3D = {"ksize": [1, 2, 2, 2, 1], "strides": [1, 2, 2, 2, 1], "padding": "SAME"}


@_for("Conv2D", "DepthwiseConv2dNative")
def _convolution(a, kind):
    filters = a.any([2, 2, 2, a.length()])
    strides = {"strides": [1] * 4, "padding": a.one_of("SAME", "VALID")}
    return getattr(raw, kind)(input=_images(a), filter=filters, **strides)


@_for("Conv3D")
def _convolution_3d(a, kind):
    filters = a.any([2, 1, 2, 2, a.length()])
    return raw.Conv3D(
        input=_images(a, 5), filter=filters, strides=[1] * 5, padding="SAME"
    )


@_for("Dilation2D")
def _dilation(a, kind):
    ones = {"strides": [1] * 4, "rates": [1] * 4, "padding": "SAME"}
    return raw.Dilation2D(input=_images(a), filter=a.any([2, 2, 2]), **ones)


@_for("MaxPool", "AvgPool", "LRN", "MaxPoolV2")
def _pool(a, kind):
    images = _images(a)
    return _call(kind, input=images, value=images, **_WINDOW)


@_for("MaxPool3D", "AvgPool3D")
def _pool_3d(a, kind):
    return getattr(raw, kind)(input=_images(a, 5), **_WINDOW_3D)


@_for("ResizeBilinear", "ResizeNearestNeighbor", "ResizeBicubic", "ResizeArea")
def _resize(a, kind):
    return getattr(raw, kind)(images=_images(a), size=[3, a.length()])


@_for("HSVToRGB", "RGBToHSV", "AdjustHue", "AdjustSaturation")
def _pixels(a, kind):
    images, change = a.any([*a.shape(a.one_of(1, 2, 3)), 3]), a.any([])
    return _call(kind, images=images, delta=change, scale=change)


@_for("ImageProjectiveTransformV2", "ImageProjectiveTransformV3")
def _transforms(a, kind):
    images, number = _images_beside(a)
    number = a.one_of(1, number, number)
    return _call(
        kind,
        images=images,
        transforms=a.any([number, 8]),
        output_shape=[3, a.length()],
        interpolation=a.one_of("NEAREST", "BILINEAR"),
        fill_value=0.0,
        fill_mode=a.one_of("REFLECT", "CONSTANT"),
    )


@_for("DrawBoundingBoxes", "DrawBoundingBoxesV2")
def _drawn_boxes(a, kind):
    images, number = _images_beside(a, channels=3)
    arguments = {"boxes": a.any([number, 2, 4], plus=np.sort), "colors": a.any([2, 3])}
    return _call(kind, images=images, **arguments)


@_for("ExtractGlimpse", "ExtractGlimpseV2")
def _glimpse(a, kind):
    images, number = _images_beside(a)
    noise = a.one_of("zero", "zero", "uniform", "gaussian")
    options = {"uniform_noise": False, "noise": noise, "normalized": a.happens()}
    return _call(kind, input=images, size=[2, 6], offsets=a.any([number, 2]), **options)


@_for("CombinedNonMaxSuppression")
def _suppressed(a, kind):
    classes = a.length()
    return raw.CombinedNonMaxSuppression(
        boxes=a.any([a.examples, 3, a.one_of(1, classes), 4]),
        scores=a.any([a.examples, 3, classes]),
        max_output_size_per_class=2,
        max_total_size=a.length(),
        iou_threshold=0.5,
        score_threshold=0.3,
        pad_per_class=a.happens(),
    )


@_for("MaxPoolWithArgmax")
def _places_of_largest(a, kind):
    in_batch = a.happens()
    return raw.MaxPoolWithArgmax(
        input=_images(a), include_batch_in_index=in_batch, **_WINDOW
    )


@_for("CropAndResize")
def _crops(a, kind):
    span = a.one_of(1, 1, 2)
    places = a.places(a.one_of(span, span, span, 1), [], a.happens())
    places = a.any([a.examples], tf.int32) if a.happens(0.2) else places
    images = a.rows([4, 4, 2], axis=0, span=span)
    boxes = a.any([a.examples, 4])
    return raw.CropAndResize(
        image=images, boxes=boxes, box_ind=places, crop_size=[2, 3]
    )


@_for("SpaceToDepth", "DepthToSpace", "ExtractImagePatches", "AdjustContrastv2")
def _rearranged(a, kind):
    images = _images(a, a.one_of(4, 4, 5, 3), channels=4)
    ones = {
        "ksizes": [1, 2, 2, 1],
        "strides": [1] * 4,
        "rates": [1] * 4,
        "padding": "VALID",
    }
    arguments = {
        "input": images,
        "images": images,
        "block_size": 2,
        "contrast_factor": 2.0,
    }
    return _call(kind, **arguments, **ones)


@_for("MaxPoolGrad", "MaxPoolGradGrad")
def _max_pool_back(a, kind):
    images, small = [4, 4, 2], [2, 2, 2]
    back = kind == "MaxPoolGradGrad"
    tensors = [a.rows(s, axis=0) for s in (images, small, images if back else small)]
    if a.happens(0.2):
        tensors[a.chance.integers(3)] = a.fixed([a.examples, *small])
    names = ("orig_input", "orig_output", "grad")
    return getattr(raw, kind)(**dict(zip(names, tensors, strict=True)), **_WINDOW)


@_for("AvgPoolGrad")
def _average_pool_back(a, kind):
    return raw.AvgPoolGrad(
        orig_input_shape=a.sizes([a.examples, 4, 4, 2], first=True),
        grad=a.rows([2, 2, 2], axis=0),
        **_WINDOW,
    )


@_for("ResizeBilinearGrad")
def _resize_back(a, kind):
    tensors = [a.rows([3, 3, 2], axis=0), a.rows([4, 4, 2], axis=0)]
    return raw.ResizeBilinearGrad(grads=tensors[0], original_image=tensors[1])


@_for("Conv2DBackpropInput", "DepthwiseConv2dNativeBackpropInput")
@_for("Conv3DBackpropInputV2")
def _transposed(a, kind):
    space, out = (3 if "3D" in kind else 2), (2 if "Depthwise" in kind else a.length())
    last = 1 if "Depthwise" in kind else out
    shape = a.sizes([a.examples, *[4] * space, 2], first=True)
    arguments = {"filter": a.any([2] * space + [2, last]), "strides": [1] * (space + 2)}
    arriving = a.rows([4] * space + [out], axis=0)
    return _call(
        kind, input_sizes=shape, out_backprop=arriving, padding="SAME", **arguments
    )


@_for("BiasAdd", "BiasAddV1")
def _bias(a, kind):
    shape = [*a.shape(a.one_of(1, 2, 3)), a.length()]
    bias = a.any(shape[-1:] if a.happens(0.7) else [a.examples])
    order = a.one_of("NHWC", "NHWC", "NCHW")
    return _call(kind, value=a.any(shape), bias=bias, data_format=order)


@_for("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
def _normalized(a, kind):
    axis, is_training = a.one_of(0, 0, 3), a.happens()
    images = a.rows([2, 2, a.examples][:3], axis=axis)
    channels = a.examples
    statistics = [a.any([channels]), a.any([channels])]
    if not is_training:
        statistics += [a.any([channels]), a.any([channels])]
    else:
        statistics += [tf.zeros([0]), tf.zeros([0])]
    names = ("scale", "offset", "mean", "variance")
    arguments = dict(zip(names, statistics, strict=True))
    results = getattr(raw, kind)(x=images, **arguments, is_training=is_training)
    return results[:3]


# Products.


@_for("MatMul")
def _product(a, kind):
    first, second = a.shape(2), a.shape(2)
    flags = {"transpose_a": a.happens(), "transpose_b": a.happens()}
    second[flags["transpose_b"] * 1] = first[1 - flags["transpose_a"] * 1]
    return raw.MatMul(a=a.any(first), b=a.any(second), **flags)


@_for("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def _products(a, kind):
    first, second = a.shape(a.one_of(2, 3, 4)), a.shape(a.one_of(2, 3, 3, 4))
    flags = {"adj_x": a.happens(), "adj_y": a.happens()}
    second[-2 + flags["adj_y"]] = first[-1 - flags["adj_x"]]
    return _call(kind, x=a.any(first), y=a.any(second), **flags, Tout=tf.float32)


@_for("Einsum")
def _einsum(a, kind):
    lengths = {label: a.length() for label in "abcd"}
    lengths["a"] = a.examples
    terms = [
        "".join(a.chance.permutation(list("abcd"))[: a.one_of(2, 3)]) for _ in "12"
    ]
    labels = sorted({*terms[0], *terms[1]})
    result = "".join(a.chance.permutation(labels)[: a.one_of(1, 2, 3)])
    tensors = [a.any([lengths[label] for label in term]) for term in terms]
    if a.happens(0.3):  # dots
        for i, term in enumerate(terms):
            place = int(a.chance.integers(len(term) + 1)) if a.happens() else 0
            shape = [lengths[label] for label in term]
            tensors[i] = a.any([*shape[:place], a.length(), *shape[place:]])
            terms[i] = f"{term[:place]}...{term[place:]}"
        place = int(a.chance.integers(len(result) + 1)) if a.happens() else 0
        result = f"{result[:place]}...{result[place:]}"
    return raw.Einsum(inputs=tensors, equation=f"{','.join(terms)}->{result}")


# Shapes.


def _factors(a: Attack, number: int) -> list[int]:
    """Returns a shape of as many elements."""
    factors = []
    while number > 1 and len(factors) < 3:
        divisors = [d for d in range(1, number + 1) if number % d == 0]
        factors.append(a.one_of(*divisors))
        number //= factors[-1]
    return [*factors, number]


@_for("Reshape")
def _reshape(a, kind):
    dtype = a.one_of(tf.float32, tf.int32)
    tail, span = a.shape(a.one_of(0, 1, 2, 3)), a.one_of(1, 1, 2)
    tensor = a.rows(tail, dtype, None, span)
    shape = _factors(a, a.examples * span * int(np.prod(tail)))
    sizes = a.sizes(shape)
    if a.happens():
        shape[int(a.chance.integers(len(shape)))] = -1
        is_left = tf.constant(shape) == -1
        sizes = tf.stack(
            [-1 if shape[i] == -1 else size for i, size in enumerate(tf.unstack(sizes))]
        )
        del is_left
    return raw.Reshape(tensor=tensor, shape=sizes)


@_for("Transpose")
def _transpose(a, kind):
    tensor, rank = _tensor(a, (1, 2, 3, 4))
    return raw.Transpose(x=tensor, perm=a.chance.permutation(rank))


@_for("ExpandDims", "Squeeze")
def _axes(a, kind):
    tensor, rank = _tensor(a, (1, 2, 3))
    if kind == "Squeeze":
        axes = _axis(a, rank, a.one_of(0, 1))
        return raw.Squeeze(input=tensor, axis=axes)
    return raw.ExpandDims(input=tensor, axis=_axis(a, rank + 1))


@_for("ConcatV2", "Pack")
def _joined(a, kind):
    shape = a.shape(a.one_of(1, 2, 3))
    if a.happens(0.7):
        shape[a.one_of(*range(len(shape)))] = a.examples
    tensors = [a.any(shape) for _ in range(a.one_of(1, 2, 2))]
    if kind == "Pack":
        return raw.Pack(values=tensors, axis=_axis(a, len(shape) + 1))
    return raw.ConcatV2(values=tensors, axis=_axis(a, len(shape)))


@_for("Unpack")
def _unpack(a, kind):
    axis, shape = int(a.chance.integers(2)), a.shape(2)
    return raw.Unpack(value=a.any(shape), num=shape[axis], axis=axis)


@_for("Split", "SplitV")
def _split(a, kind):
    axis, shape, number = _axis(a, 2), a.shape(2), a.one_of(1, 2)
    shape[axis] = number * a.examples if a.happens() else number
    arguments = {"value": a.any(shape), "axis": axis, "num_split": number}
    if kind == "Split":
        return raw.Split(**arguments)
    return raw.SplitV(**arguments, size_splits=[-1, shape[axis] // 2][:number])


@_for("Pad", "PadV2", "MirrorPad")
def _pad(a, kind):
    tensor, rank = _tensor(a, (1, 2, 3))
    paddings = a.chance.integers(0, 2, [rank, 2]) * a.chance.integers(0, 2, [rank, 1])
    arguments = {"constant_values": 1.0, "mode": "SYMMETRIC"}
    return _call(kind, input=tensor, paddings=paddings.astype(np.int32), **arguments)


@_for("OneHot")
def _one_hot(a, kind):
    tensor, rank = _tensor(a, (1, 2), tf.int32)
    axis = int(a.chance.integers(-1, rank + 1))
    depth = a.number_of_examples() if a.happens(0.2) else 3
    values = {"on_value": 1.0, "off_value": a.any([])}
    return raw.OneHot(indices=tensor, depth=depth, axis=axis, **values)


def _bound(a: Attack, *values):
    """Returns a bound of a slice, perhaps the number of examples."""
    return a.number_of_examples() if a.happens(0.25) else tf.constant(a.one_of(*values))


@_for("StridedSlice")
def _strided_slice(a, kind):
    tensor, rank = _tensor(a, (1, 2, 3), a.one_of(tf.float32, tf.int32))
    number = int(a.chance.integers(1, rank + 2))
    masks = {
        f"{name}_mask": sum(2**i for i in range(number) if a.happens(p))
        for name, p in (
            ("begin", 0.6),
            ("end", 0.6),
            ("new_axis", 0.1),
            ("shrink_axis", 0.15),
        )
    }
    masks["ellipsis_mask"] = 2 ** int(a.chance.integers(number)) * a.happens(0.2)
    return raw.StridedSlice(
        input=tensor,
        begin=tf.stack([_bound(a, 0, 0, 1, -1) for _ in range(number)]),
        end=tf.stack([_bound(a, 1, 2, -1, a.examples) for _ in range(number)]),
        strides=tf.stack([_bound(a, 1, 1, 1, 2, -1) for _ in range(number)]),
        **masks,
    )


@_for("StridedSliceGrad")
def _strided_slice_back(a, kind):
    shape = [a.examples, *a.shape(2)]
    masks = {"begin_mask": a.one_of(1, 3, 7), "end_mask": a.one_of(1, 3, 7)}
    begin, end, strides = [0, 0, 0], [1, 1, 1], [1, a.one_of(1, 2), 1]
    like = np.zeros(shape)[
        tuple(
            slice(
                None if masks["begin_mask"] >> i & 1 else begin[i],
                None if masks["end_mask"] >> i & 1 else end[i],
                strides[i],
            )
            for i in range(3)
        )
    ].shape
    arguments = {"begin": begin, "end": end, "strides": strides}
    return raw.StridedSliceGrad(
        shape=a.sizes(shape), dy=a.any(like), **arguments, **masks
    )


@_for("Slice")
def _slice(a, kind):
    tensor, rank = _tensor(a, (1, 2, 3), a.one_of(tf.float32, tf.int32))
    return raw.Slice(
        input=tensor,
        begin=tf.stack([_bound(a, 0, 0, 0, 1) for _ in range(rank)]),
        size=tf.stack([_bound(a, -1, -1, 1, a.examples) for _ in range(rank)]),
    )


# Results of sizes.


@_for("Fill")
def _fill(a, kind):
    return raw.Fill(dims=a.sizes(a.shape(2)), value=a.any([]))


@_for("RandomUniform", "RandomStandardNormal", "TruncatedNormal")
def _random(a, kind):
    return getattr(raw, kind)(shape=a.sizes(a.shape(2)), dtype=tf.float32)


@_for("RandomUniformInt")
def _random_int(a, kind):
    return raw.RandomUniformInt(shape=a.sizes(a.shape(2)), minval=0, maxval=9)


@_for("StatelessRandomUniform", "StatelessRandomNormal", "StatelessTruncatedNormal")
@_for("StatelessRandomUniformV2", "StatelessRandomNormalV2")
@_for("StatelessTruncatedNormalV2")
@_for("StatelessRandomUniformInt", "StatelessRandomUniformIntV2")
def _stateless(a, kind):
    seed = v1.placeholder_with_default([1, 2], [2])
    key = v1.placeholder_with_default(tf.constant([1], tf.uint64), [1])
    counter = tf.constant([1, 2], tf.uint64)
    arguments = {
        "seed": seed,
        "key": key,
        "counter": counter,
        "alg": 1,
        "minval": 0,
        "maxval": 9,
    }
    return _call(kind, shape=a.sizes(a.shape(2)), **arguments)


@_for("RandomGamma", "RandomPoissonV2")
@_for("StatelessRandomGammaV2", "StatelessRandomGammaV3", "StatelessRandomPoisson")
def _random_by_parameters(a, kind):
    shape = a.shape(a.one_of(0, 1, 2, 3))
    number = int(a.chance.integers(len(shape) + 1))
    parameter = a.any([n if a.happens(0.8) else 1 for n in shape[number:]])
    whole = shape if kind.startswith("Stateless") else shape[:number]
    arguments = {
        "key": v1.placeholder_with_default(tf.constant([1], tf.uint64), [1]),
        "counter": tf.constant([1, 2], tf.uint64),
        "alg": 1,
        **dict.fromkeys(("alpha", "rate", "lam"), parameter),
    }
    if kind.startswith("Stateless"):
        arguments["seed"] = v1.placeholder_with_default([1, 2], [2])
    if "Poisson" in kind:
        arguments["dtype"] = tf.float32
    size = a.sizes(whole) if whole else tf.zeros([0], tf.int32)
    return _call(kind, shape=size, **arguments)


@_for("RngReadAndSkip")
def _generator(a, kind):
    generator = tf.random.Generator.from_seed(1)
    return generator.normal(a.sizes(a.shape(2)))


@_for("Multinomial", "StatelessMultinomial")
def _multinomial(a, kind):
    seed = v1.placeholder_with_default([1, 2], [2])
    arguments = {"logits": _tensor(a, (2,))[0], "num_samples": a.length()}
    return _call(kind, **arguments, seed=seed if kind.startswith("S") else 1)


@_for("Range")
def _range(a, kind):
    limit = a.number_of_examples() * a.one_of(1, 1, 2)
    return raw.Range(start=a.one_of(0, 0, 1), limit=limit, delta=a.one_of(1, 1, 2))


@_for("Tile", "BroadcastTo")
def _tile(a, kind):
    dtype = a.one_of(tf.float32, tf.int32)
    shape = [a.one_of(1, 1, a.examples) for _ in range(a.one_of(1, 2, 3))]
    if kind == "Tile":
        return raw.Tile(input=a.any(shape, dtype), multiples=a.sizes(shape[::-1]))
    wide = [*a.shape(a.one_of(0, 1)), *[n if n > 1 else a.length() for n in shape]]
    return raw.BroadcastTo(input=a.any(shape, dtype), shape=a.sizes(wide))


# Look-ups.


@_for("GatherV2", "Gather")
def _gather(a, kind):
    if a.happens(0.3) or kind == "Gather":
        span, tail = a.one_of(1, 2, 3), a.shape(a.one_of(0, 1))
        table = a.rows(tail, axis=0, span=span)
        places = a.places(span, a.shape(a.one_of(0, 1, 2)), a.happens())
        if a.happens(0.3):
            table = a.fixed([3, 2])
            places = a.any(a.shape(2), tf.int32)
        return _call(kind, params=table, indices=places, axis=0)
    rank = a.one_of(1, 2, 3)
    axis = int(a.chance.integers(rank))
    batch_dims = int(a.chance.integers(axis + 1)) if a.happens() else 0
    shape = [3 if i == axis else a.examples for i in range(rank)]
    indices = [*shape[:batch_dims], *a.shape(a.one_of(0, 1))]
    return raw.GatherV2(
        params=a.any(shape),
        indices=a.any(indices, tf.int32),
        axis=axis,
        batch_dims=batch_dims,
    )


def _handle(a: Attack):
    return tf.Variable(a.numbers([3, 2], tf.float32)).handle


@_for("ResourceGather", "ResourceGatherNd")
def _gather_variable(a, kind):
    shape = a.shape(a.one_of(1, 2))
    places = a.any(shape if kind == "ResourceGather" else [*shape, 1], tf.int32)
    return _call(kind, resource=_handle(a), indices=places, dtype=tf.float32)


@_for("GatherNd")
def _gather_nd(a, kind):
    n = a.examples
    span, tail = a.one_of(1, 1, 2), [n, n]
    number = a.places(span, [1], False)
    if a.happens(0.3):
        number = tf.tile(number, [1, a.one_of(1, 2)])
    pieces = [number]
    if a.happens(0.7):
        pieces.append(a.rows([a.one_of(1, 2)], tf.int32, 0, most=n))
    if a.happens(0.2):
        pieces = pieces[::-1]
    places = tf.concat(pieces, 1) if len(pieces) > 1 else number
    if a.happens(0.2):
        columns = [tf.squeeze(piece[:, :1], 1) for piece in pieces]
        places = tf.transpose(tf.stack(columns), a.one_of([1, 0], [1, 0], [0, 1]))
    if a.happens(0.2):
        places = tf.tile(places, [1, a.one_of(1, 2)])
    if a.happens(0.2):
        places = places[:, : a.one_of(1, 2)]
    if a.happens(0.2):
        places = a.any([n, a.one_of(1, 2)], tf.int32)
    table = a.any([3, 3]) if a.happens(0.2) else a.rows(tail, axis=0, span=span)
    if a.happens(0.2):  # of the numbers of examples
        numbers = a.places(span, [1, 1], False)
        table = tf.concat([numbers, a.rows([1, 1], tf.int32, 0, most=n)], 2)
    return raw.GatherNd(params=table, indices=places)


# Lists of entries.


def _sparse(a: Attack, dtype=tf.float32, width: int | None = None):
    """Returns indices, values and shape of a sparse matrix, mostly of one list."""
    span, width = a.one_of(1, 1, 2), width or a.length()
    if a.happens(0.15):
        return _sparse_of_all(a, dtype, width)
    indices = a.entries([width], span)
    table = a.rows([width], dtype, 0, span, most=9)
    values = tf.gather_nd(table, indices)
    if a.happens(0.15):
        values = tf.gather_nd(table, a.entries([width], span))
    if a.happens(0.2):  # another list, of as many entries
        mask = tf.reverse(indices.op.inputs[0], [1])
        values = tf.gather_nd(table, tf.where(mask))
    if a.happens(0.15):
        shape = a.sizes([a.examples * span, width])
    else:
        shape = tf.shape(table)
    return indices, values, tf.cast(shape, tf.int64)


def _sparse_of_all(a: Attack, dtype, width: int):
    """Returns a sparse matrix with all entries of its rows, as bucketized columns do."""
    number = a.number_of_examples()
    rows = tf.reshape(tf.tile(tf.range(number)[:, None], [1, width]), [-1])
    columns = tf.tile(tf.range(width), [number])
    indices = tf.cast(tf.transpose(tf.stack([rows, columns])), tf.int64)
    values = tf.reshape(a.rows([width], dtype, 0, most=9), [-1])
    return indices, values, tf.cast(tf.stack([number, width]), tf.int64)


def _filled(a: Attack, dtype=tf.float32):
    """Returns indices, values and shape without an empty row."""
    indices, values, shape = _sparse(a, dtype)
    if a.happens(0.15):
        return indices, values, shape
    default = {tf.string: "b"}.get(dtype, 0)
    filled = raw.SparseFillEmptyRows(
        indices=indices,
        values=values,
        dense_shape=shape,
        default_value=tf.constant(default, dtype),
    )
    return filled.output_indices, filled.output_values, shape


@_for("Where")
def _where(a, kind):
    shape = a.shape(a.one_of(1, 2, 3))
    return raw.Where(condition=a.any(shape, tf.bool))


@_for("StringSplit", "StringSplitV2")
def _split_texts(a, kind):
    texts = a.any([a.examples * a.one_of(1, 2)], tf.string)
    texts = tf.strings.join([texts, "x y", texts], " ")
    return _call(kind, input=texts, delimiter=" ", sep=" ")


@_for("ParseExampleV2")
def _parse(a, kind):
    texts = []
    for _ in range(3):
        example = tf.train.Example()
        for name in "abc":
            numbers = a.chance.uniform(size=2 if name == "c" else a.chance.integers(3))
            example.features.feature[name].float_list.value.extend(numbers)
        texts.append(example.SerializeToString())
    texts = (
        tf.constant(texts)
        if a.happens(0.1)
        else tf.gather(
            tf.constant(texts), a.rows([], tf.int32, axis=0, span=a.one_of(1, 1, 2))
        )
    )
    of_all = tf.io.FixedLenSequenceFeature([], tf.float32, allow_missing=True)
    features = {
        "a": tf.io.VarLenFeature(tf.float32),
        "b": a.one_of(of_all, tf.io.VarLenFeature(tf.float32)),
        "c": tf.io.FixedLenFeature([2], tf.float32),
    }
    return tf.nest.flatten(v1.io.parse_example(texts, features), expand_composites=True)


@_for("SparseCross", "SparseCrossV2", "SparseCrossHashed")
def _cross(a, kind):
    matrices = [_sparse(a, tf.string) for _ in range(a.one_of(1, 2))]
    indices, values, shapes = zip(*matrices, strict=True)
    dense = [a.any([a.examples, a.length()], tf.string)] * a.one_of(0, 1)
    arguments = {"hashed_output": False, "num_buckets": 0, "hash_key": 1, "sep": "_"}
    types = {"out_type": tf.string, "internal_type": tf.string, "salt": [1, 2]}
    types["strong_hash"] = False
    parts = {"indices": indices, "values": values, "shapes": shapes}
    return _call(kind, **parts, dense_inputs=dense, **arguments, **types)


@_for("SparseFillEmptyRows")
def _fill_empty_rows(a, kind):
    return [*_filled(a, a.one_of(tf.float32, tf.string))[:2]]


@_for("SparseReshape")
def _reshape_sparse(a, kind):
    indices, _, shape = _sparse(a)
    number = int(indices.op.inputs[0].shape[1] or 2)
    first, second = shape[0], shape[1]
    target = a.one_of(
        [first * second, 1],
        [first, -1],
        [-1, second],
        [first, second, 1],
        [second, first],
        [-1],
        [-1, number],
        [first // 2, -1],
    )
    target = tf.stack([tf.cast(size, tf.int64) for size in target])
    return raw.SparseReshape(input_indices=indices, input_shape=shape, new_shape=target)


@_for("Unique")
def _unique(a, kind):
    _, values, _ = _sparse(a, a.one_of(tf.int32, tf.string))
    values = a.any([a.examples], tf.int32) if a.happens(0.2) else values
    unique = raw.Unique(x=values)
    gathered = tf.gather(unique.y, unique.idx)
    if a.happens(0.2):
        gathered = tf.gather(gathered, unique.idx)
    return unique.y, unique.idx, gathered


@_for("SparseToDense", "ScatterNd")
def _scatter(a, kind):
    if a.happens(0.3) and kind == "ScatterNd":
        return _scatter_to_own(a)
    if a.happens(0.3) and kind == "SparseToDense":
        return _columns_of_words(a)
    indices, values, shape = _sparse(a)
    values = a.any([]) if a.happens(0.1) and kind == "SparseToDense" else values
    arguments = {"sparse_indices": indices, "sparse_values": values}
    arguments |= {"output_shape": shape, "default_value": a.any([])}
    return _call(kind, **arguments, indices=indices, updates=values, shape=shape)


@_for("UnsortedSegmentJoin")
def _fixed_segments(a, kind):
    shape = a.shape(3)
    data = a.any(shape, tf.string if kind.endswith("Join") else tf.float32)
    rank = a.one_of(1, 2) if kind.startswith("Unsorted") else 1
    numbers = np.sort(a.chance.integers(0, 2, shape[:rank]), 0).astype(np.int32)
    arguments = {"data": data, "inputs": data, "segment_ids": tf.constant(numbers)}
    arguments["num_segments"] = a.one_of(2, a.number_of_examples())
    return _call(kind, **arguments, indices=np.arange(shape[0]) % 2)


def _columns_of_words(a: Attack):
    texts = tf.strings.regex_replace(a.rows([], tf.string, 0), "[.]", " ")
    words = v1.string_split(texts)
    ids = words.with_values(tf.strings.to_hash_bucket_fast(words.values, 3))
    dense = raw.SparseToDense(
        sparse_indices=ids.indices,
        output_shape=ids.dense_shape,
        sparse_values=ids.values,
        default_value=tf.constant(a.one_of(-1, -1, -1, 0), tf.int64),
    )
    hot = tf.one_hot(dense, 4, a.one_of(1.0, 2.0), a.one_of(0.0, 0.0, 0.0, 1.0))
    axis = a.one_of(1, 1, -2, 2, 0)
    way = a.one_of(tf.reduce_sum, tf.reduce_sum, tf.reduce_max)
    return way(hot, a.one_of(axis, [axis]))


def _scatter_to_own(a: Attack):
    span, n = a.one_of(1, 1, 2), a.examples
    numbers = a.places(a.one_of(span, span, 1), [1], False)
    pieces = [numbers, a.rows([1], tf.int32, 0, most=n)][:: a.one_of(1, 1, 1, -1)]
    places = tf.concat(pieces, 1)
    places = places[:, :1] if a.happens(0.2) else places
    rows = a.sizes([n * span, n], first=a.happens(0.8))
    updates = a.rows([], axis=0, span=a.one_of(1, 1, 1, span))
    return raw.ScatterNd(indices=places, updates=updates, shape=rows)


_SEGMENTS = ("Sum", "Mean", "Max", "Min", "Prod")


@_for(*(f"Segment{name}" for name in _SEGMENTS))
@_for(*(f"UnsortedSegment{name}" for name in _SEGMENTS if name != "Mean"))
def _segments(a, kind):
    if a.happens(0.3):
        return _fixed_segments(a, kind)
    indices, values, shape = (_sparse if a.happens(0.3) else _filled)(a)
    values = a.any([a.examples]) if a.happens(0.1) else values
    numbers = indices[:, a.one_of(0, 0, 0, 1)]
    rows = shape[a.one_of(0, 0, 0, 1)]
    arguments = {"data": values, "segment_ids": numbers, "num_segments": rows}
    result = _call(kind, **arguments)
    return result if a.happens() else _with_last_rows(a, result, rows)


def _with_last_rows(a: Attack, result: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Returns rows with zeros for the last ones, as the lengths of sequences."""
    result = tf.cast(result, tf.float32)
    result = a.one_of(result, result / 2, tf.math.ceil(result * 3), result + 1)
    rows = a.one_of(rows, rows, a.examples)
    missing = tf.cast(rows, tf.int32) - tf.shape(result)[0]
    padding = a.one_of(tf.zeros, tf.zeros, tf.ones)([missing])
    return tf.concat([result, padding][:: a.one_of(1, 1, 1, -1)], 0)


_MEANS = ("Sum", "Mean", "SqrtN")


@_for(*(f"SparseSegment{name}" for name in _MEANS))
@_for(*(f"SparseSegment{name}WithNumSegments" for name in _MEANS))
def _sparse_segments(a, kind):
    if a.happens(0.3):
        return _fixed_segments(a, kind)
    indices, values, shape = (_sparse if a.happens(0.3) else _filled)(a, tf.int32)
    unique = raw.Unique(x=values)
    table = a.fixed([9, 2])
    rows = tf.gather(table, unique.y)
    if a.happens(0.15):
        rows = tf.gather(table, raw.Unique(x=tf.reverse(values, [0])).y)
    numbers, places = indices[:, a.one_of(0, 0, 0, 1)], unique.idx
    if a.happens(0.3):
        rows, places = table, values
    arguments = {"data": rows, "indices": places, "segment_ids": numbers}
    return _call(kind, **arguments, num_segments=shape[a.one_of(0, 0, 1)])


@_for("SparseTensorDenseMatMul")
def _sparse_product(a, kind):
    width = a.length()
    indices, values, shape = _sparse(a, width=width)
    return raw.SparseTensorDenseMatMul(
        a_indices=indices,
        a_values=values,
        a_shape=shape,
        b=a.any([width, 2]),
        adjoint_a=a.happens(0.1),
    )


@_for("SparseReduceSum", "SparseReduceMax")
def _sparse_sum(a, kind):
    indices, values, shape = _sparse(a)
    return _call(
        kind,
        input_indices=indices,
        input_values=values,
        input_shape=shape,
        reduction_axes=[a.one_of(1, 1, -1, 0)],
        keep_dims=a.happens(),
    )


@_for("SparseReorder", "SparseSoftmax", "SparseSplit", "SparseSlice")
def _of_one_sparse(a, kind):
    indices, values, shape = (_sparse if a.happens(0.7) else _filled)(a)
    width = a.one_of(shape[1], 1, 2)
    arguments = {"start": [a.one_of(0, 0, 0, 1), a.one_of(0, 0, 1)]}
    arguments["size"] = tf.stack([a.one_of(shape[0], shape[0], 1), width])
    arguments |= {"split_dim": a.one_of(1, 1, 0), "num_split": a.one_of(1, 2)}
    inputs = {"indices": indices, "values": values, "shape": shape}
    for prefix in ("input", "sp"):
        arguments |= {f"{prefix}_{name}": value for name, value in inputs.items()}
    results = _call(kind, **inputs, **arguments)
    if kind == "SparseReorder":
        sums = tf.math.segment_sum(results[1], results[0][:, 0])
        return [*results, sums]
    return results


@_for("SparseConcat")
def _concat_sparse(a, kind):
    parts = zip(*(_sparse(a) for _ in range(a.one_of(1, 2))), strict=True)
    indices, values, shapes = parts
    axis = a.one_of(1, 1, -1, 0)
    return raw.SparseConcat(
        indices=indices, values=values, shapes=shapes, concat_dim=axis
    )


@_for("SparseAdd", "SparseSparseMaximum", "SparseSparseMinimum")
def _pair_of_sparse(a, kind):
    width, arguments = a.length(), {}
    for name in ("a", "b"):
        indices, values, shape = _sparse(a, width=width)
        arguments |= {f"{name}_indices": indices, f"{name}_values": values}
        arguments[f"{name}_shape"] = shape
    return _call(kind, **arguments, thresh=a.one_of(0.0, 0.5))


@_for("SparseDenseCwiseAdd", "SparseDenseCwiseMul", "SparseDenseCwiseDiv")
@_for("SparseTensorDenseAdd")
def _sparse_beside_dense(a, kind):
    width = a.length()
    indices, values, shape = _sparse(a, width=width)
    rows = a.examples * a.one_of(1, 1, 2)
    dense = a.any(a.one_of([rows, width], [1, width], [width], [rows, 1]))
    inputs = {"indices": indices, "values": values, "shape": shape}
    arguments = {f"sp_{name}": value for name, value in inputs.items()}
    arguments |= {f"a_{name}": value for name, value in inputs.items()}
    return _call(kind, **arguments, dense=dense, b=dense)


@_for("SparseBincount")
def _sparse_counts(a, kind):
    indices, values, shape = _sparse(a, tf.int32)
    weights = a.one_of(tf.zeros([0]), tf.cast(values, tf.float32), a.any([a.examples]))
    arguments = {"size": a.one_of(4, _clamped_size(a)), "binary_output": a.happens()}
    inputs = {"indices": indices, "values": values, "dense_shape": shape}
    return raw.SparseBincount(**inputs, **arguments, weights=weights)


@_for("CTCGreedyDecoder", "CTCBeamSearchDecoder", "CTCLoss")
def _paths(a, kind):
    span = a.one_of(1, 1, 2)
    signals = a.rows([3, 4], axis=a.one_of(0, 1, 1, 1), span=span)
    lengths = a.any([a.examples * a.one_of(span, span, 1)], tf.int32) + 1
    indices, values, _ = _sparse(a, tf.int32, width=1)
    arguments = {"labels_indices": indices, "labels_values": values % 3}
    arguments |= {"beam_width": 2, "top_paths": a.one_of(1, 2)}
    return _call(kind, inputs=signals, sequence_length=lengths, **arguments)


@_for("RaggedTensorToTensor")
def _padded(a, kind):
    span, width = a.one_of(1, 1, 2), a.length()
    number = tf.cast(a.number_of_examples() * span, tf.int64) * a.one_of(1, 1, 1, 2)
    first = a.one_of(*[tf.constant(-1, tf.int64)] * 3, number, tf.constant(2, tf.int64))
    shape = tf.stack([first, a.one_of(width, width, -1, 2, number)])
    if a.happens():
        values, splits = _ragged(a, span=span)
        if a.happens(0.2):  # vectors
            values = tf.stack([values, -values], 1)
            shape = tf.concat([shape, [2]], 0)
        partitions = [splits]
        if a.happens(0.2):  # rows of rows
            texts, outer = _ragged(a, tf.string, span)
            letters = tf.strings.unicode_decode(texts, "UTF-8")
            values, partitions = letters.values, [outer, letters.row_splits]
            shape = tf.concat([shape[:2], [a.one_of(2, 3)]], 0)
        return raw.RaggedTensorToTensor(
            shape=shape,
            values=values,
            default_value=tf.cast(a.any([]), values.dtype),
            row_partition_tensors=partitions,
            row_partition_types=["ROW_SPLITS"] * len(partitions),
        )
    indices, table = a.entries([width], span), a.rows([width], axis=0, span=span)
    return raw.RaggedTensorToTensor(  # others may crash the process
        shape=shape,
        values=tf.gather_nd(table, indices),
        default_value=a.any([]),
        row_partition_tensors=[number, indices[:, 0]],
        row_partition_types=["FIRST_DIM_SIZE", "VALUE_ROWIDS"],
    )


def _ragged(a: Attack, dtype=tf.float32, span: int | None = None):
    """Returns values and row splits of a ragged matrix, mostly of one list."""
    span = span or a.one_of(1, 1, 2)
    way = a.one_of("chosen", "chosen", "uniform", "letters", "words", "range")
    number = a.number_of_examples() * span
    if way == "chosen":
        width = a.length()
        table = a.rows([width], dtype, 0, span, most=9)
        indices = a.entries([width], span)
        values = tf.gather_nd(table, indices)
        lists = tf.RaggedTensor.from_value_rowids(
            values, indices[:, 0], tf.cast(number, tf.int64), validate=False
        )
        splits = lists.row_splits
    elif way == "uniform":
        width = a.one_of(1, 2, a.examples)
        values = tf.reshape(a.rows([width], dtype, 0, span, most=9), [-1])
        splits = tf.cast(tf.range(number + 1) * width, tf.int64)
    elif way == "range":
        lengths = a.rows([], tf.int32, 0, span)
        lists = tf.ragged.range(tf.stack(lengths))
        values = _as(dtype, tf.as_string(lists.values))
        splits = tf.cast(lists.row_splits, tf.int64)
    else:
        texts = a.rows([], tf.string, 0, span)
        if way == "words":
            lists = tf.strings.split(tf.strings.regex_replace(texts, "a", " 3 "))
        else:
            lists = tf.strings.unicode_split(texts, "UTF-8")
        values, splits = _as(dtype, lists.values), lists.row_splits
    if a.happens(0.15):  # another list, of as many entries
        values = tf.reverse(values, [0])
    if a.happens(0.1):
        splits = _ragged(a, dtype, span)[1]
    return values, splits


def _as(dtype, texts: tf.Tensor) -> tf.Tensor:
    """Returns texts, or a number for each of them."""
    if dtype == tf.string:
        return texts
    return tf.cast(tf.strings.to_hash_bucket_fast(texts, 9), dtype)


@_for("RaggedGather")
def _side_by_side(a, kind):
    span = a.one_of(1, 1, 2)
    spans = span, a.one_of(span, span, span, 1), span
    lists = [
        tf.RaggedTensor.from_row_splits(*_ragged(a, span=n), validate=False)
        for n in spans[: a.one_of(2, 2, 3)]
    ]
    lists += lists[: a.one_of(0, 0, 1)]
    if a.happens(0.2):
        lists[0] = a.rows([a.length()], axis=0, span=span)
    joined = a.one_of(tf.concat, tf.stack)(lists, a.one_of(0, 1, 1, 1))
    return tf.nest.flatten(joined, expand_composites=True)


@_for("RaggedTensorToSparse")
def _from_ragged(a, kind):
    values, splits = _ragged(a, a.one_of(tf.float32, tf.string))
    if a.happens(0.1):
        values = tf.stack([values, values], 1)
    return raw.RaggedTensorToSparse(rt_nested_splits=[splits], rt_dense_values=values)


@_for("RaggedBincount")
def _ragged_counts(a, kind):
    values, splits = _ragged(a, tf.int32)
    weights = a.one_of(
        tf.zeros([0]),
        tf.cast(values, tf.float32) / 7,
        a.rows([], axis=0, span=1),
    )
    size = tf.constant(4) if a.happens(0.8) else a.number_of_examples()
    return raw.RaggedBincount(
        splits=splits,
        values=values,
        size=size,
        weights=weights,
        binary_output=a.happens(),
    )


@_for("StringNGrams")
def _groups_of_words(a, kind):
    values, splits = _ragged(a, tf.string)
    has_padding = a.happens()
    return raw.StringNGrams(
        data=values,
        data_splits=splits,
        separator="_",
        ngram_widths=a.one_of([2], [1, 3]),
        left_pad="<" if has_padding else "",
        right_pad=">" if has_padding else "",
        pad_width=a.one_of(-1, 0, 1) if has_padding else 0,
        preserve_short_sequences=a.happens(),
    )


@_for("UnicodeDecode", "UnicodeDecodeWithOffsets")
def _letters(a, kind):
    texts = a.any([a.examples * a.one_of(1, 1, 2)], tf.string)
    if a.happens(0.3):
        texts, _ = _ragged(a, tf.string)
    return _call(kind, input=texts, input_encoding="UTF-8")


@_for("UnicodeEncode")
def _from_letters(a, kind):
    texts, outer = a.rows([], tf.string, 0, a.one_of(1, 1, 2)), None
    if a.happens(0.3):
        texts, outer = _ragged(a, tf.string)
    letters = tf.strings.unicode_decode(texts, "UTF-8")
    splits = letters.row_splits
    if a.happens(0.3):
        splits = tf.range(tf.shape(letters.values, tf.int64)[0] + 1)
    if a.happens(0.1):
        splits = splits * 2
    values = letters.values
    if a.happens(0.1):
        values = tf.reverse(values, [0])
    encoded = raw.UnicodeEncode(
        input_values=values, input_splits=splits, output_encoding="UTF-8"
    )
    if outer is None:
        return encoded
    return encoded, raw.RaggedTensorToTensor(
        shape=tf.constant([-1, 2], tf.int64),
        values=tf.gather(encoded, tf.range(tf.shape(texts)[0])),
        default_value="",
        row_partition_tensors=[outer],
        row_partition_types=["ROW_SPLITS"],
    )


@_for("RaggedCross")
def _ragged_cross(a, kind):
    span = a.one_of(1, 1, 2)
    spans = span, a.one_of(span, span, span, 1)
    lists = [_ragged(a, tf.string, spans[i]) for i in range(a.one_of(1, 2))]
    inputs = [tf.RaggedTensor.from_row_splits(*pair, validate=False) for pair in lists]
    if a.happens(0.3):
        inputs.append(a.any([a.examples * span, a.length()], tf.string))
    if a.happens(0.3):
        inputs.append(tf.SparseTensor(*_sparse(a, tf.string)))
    cross = a.one_of(tf.ragged.cross, lambda x: tf.ragged.cross_hashed(x, 7))
    return tf.nest.flatten(cross(inputs), expand_composites=True)


@_for("RaggedRange")
def _ranges(a, kind):
    if a.happens():
        _, splits = _ragged(a)
        begins, ends = splits[:-1], splits[1:]
        number = a.one_of(1, 2)
        bounds = [
            (begins, tf.minimum(begins + number, ends)),
            (tf.maximum(ends - number, begins), ends),
            (begins, ends),
            (begins, begins + number),
            (ends - number, ends),
            (tf.minimum(begins + 1, ends), tf.maximum(ends - 1, begins)),
        ]
        starts, limits = a.one_of(*bounds)
        step = tf.constant(a.one_of(1, 1, 2), tf.int64)
        return raw.RaggedRange(starts=starts, limits=limits, deltas=step)
    numbers = [a.any([a.examples * a.one_of(1, 1, 1, 2)], tf.int32) for _ in range(3)]
    starts, limits, deltas = (
        number if a.happens() else tf.constant(default)
        for number, default in zip(numbers, (0, 3, 1), strict=True)
    )
    return raw.RaggedRange(starts=starts, limits=limits, deltas=deltas + 1)


def _of_ragged(a: Attack, x: tf.RaggedTensor, y: tf.RaggedTensor):
    """Returns the result of a step from ragged tensors to others, or to tensors."""
    numbers = a.one_of(
        lambda: x.row_lengths(), lambda: a.rows([], tf.int64, 0), lambda: x.row_splits
    )
    return a.one_of(
        lambda: x[:, : a.one_of(1, 2)],
        lambda: x[:, a.one_of(1, -1) :],
        lambda: x[:, : -a.one_of(1, 2)],
        lambda: x[:, ::2],
        lambda: x[1:],
        lambda: x.with_values(tf.exp(x.values)),
        lambda: x.with_values(y.values),
        lambda: x.with_values(tf.concat([x.values[1:], x.values[:1]], 0)),
        lambda: tf.reduce_sum(x, 1),
        lambda: tf.reduce_mean(x, 1),
        lambda: tf.reduce_max(x, 1),
        lambda: tf.reduce_sum(x, 0),
        lambda: tf.reduce_sum(y.with_values(x.values), 1),
        lambda: tf.concat([x, y], 1),
        lambda: tf.concat([x, y], 0),
        lambda: tf.stack([x, y], 1),
        lambda: tf.ragged.boolean_mask(x, x.with_values(y.values > 2)),
        lambda: tf.ragged.boolean_mask(x, x > 2),
        lambda: tf.ragged.boolean_mask(
            a.rows([2], axis=0), a.rows([2], tf.bool, axis=0)
        ),
        lambda: tf.ragged.range(numbers()),
        lambda: tf.ragged.range(a.one_of(0, 1), numbers(), a.one_of(1, 2)),
        lambda: tf.repeat(tf.range(x.nrows()), numbers()),
        lambda: tf.repeat(a.rows([], axis=0), numbers()),
        lambda: tf.repeat(a.rows([2], axis=0), numbers(), axis=0),
        lambda: tf.repeat(a.rows([2], axis=0), 1 - numbers(), axis=0),
        lambda: tf.repeat(a.fixed([2]), numbers()),
        lambda: tf.RaggedTensor.from_row_lengths(x.values, numbers(), validate=False),
        lambda: tf.RaggedTensor.from_value_rowids(
            x.values, y.value_rowids(), x.nrows(), validate=False
        ),
        lambda: tf.RaggedTensor.from_tensor(a.rows([2], axis=0)),
        lambda: tf.RaggedTensor.from_tensor(a.rows([2], axis=0), padding=0.5),
        lambda: tf.RaggedTensor.from_tensor(a.rows([2], axis=0), lengths=numbers()),
        lambda: tf.RaggedTensor.from_tensor(
            a.rows([a.one_of(2, 3)], axis=0), a.rows([], tf.int32, 0) - a.one_of(0, 1)
        ),
        lambda: _ragged_by_bounds(a),
        lambda: tf.cumsum(
            tf.math.unsorted_segment_sum(
                tf.cast(tf.stack([x.values > 2, x.values > 1], 1), tf.int32),
                x.value_rowids(),
                x.nrows(),
            )
        ),
        lambda: tf.strings.unicode_decode(
            tf.tile(a.rows([], tf.string, 0), [2]), "UTF-8"
        ),
        lambda: x.value_rowids(),
        lambda: x.row_lengths() * a.one_of(1, 2),
        lambda: tf.cumsum(numbers()),
        lambda: tf.concat([[0], tf.cumsum(numbers())], 0),
        lambda: tf.concat([[a.one_of(0, 1)], tf.cast(x.row_splits[1:], tf.int32)], 0),
        lambda: x.row_splits * a.one_of(1, 2),
        lambda: x.row_splits + 1,
        lambda: x.row_splits[-1],
        lambda: x.row_splits[a.one_of(0, 1)],
        lambda: x.row_splits[1:] - x.row_splits[:-1],
        lambda: x.row_splits[1:] - y.row_splits[:-1],
        lambda: x.row_splits[:-1] - x.row_splits[1:],
        lambda: x.row_splits[a.one_of(0, 1, 2) :],
        lambda: x.row_splits[: -a.one_of(1, 2)],
        lambda: x.row_splits[::2],
        lambda: tf.minimum(x.row_splits[:-1] + 1, y.row_splits[1:]),
        lambda: tf.gather(x.values, x.row_splits[:-1]),
        lambda: tf.gather(x, [[0]] * a.examples, batch_dims=1),
        lambda: tf.range(tf.shape(a.rows([], axis=0))[0] + a.one_of(1, 1, 2)),
        lambda: tf.range(tf.shape(x.values)[0] + a.one_of(1, 1, 2)),
        lambda: tf.fill([x.nrows() + 1], 1.0),
        lambda: tf.fill([tf.shape(x.row_splits)[0]], 1.0),
        lambda: tf.zeros_like(x.row_splits),
        lambda: tf.cast(x.row_splits, a.one_of(tf.int32, tf.float32)),
        lambda: tf.reshape(x.row_splits, [-1, 1]),
        lambda: x.to_tensor(),
        lambda: x.to_tensor(shape=[None, a.one_of(1, 3)]),
        lambda: x.to_sparse(),
        lambda: tf.RaggedTensor.from_sparse(x.to_sparse()),
        lambda: x * a.one_of(2.0, tf.ones([a.examples, 1]), a.rows([1], axis=0)),
        lambda: tf.nn.softmax(x),
        lambda: tf.reverse(x, [1]),
        lambda: tf.expand_dims(x, a.one_of(1, 2)),
        lambda: x.with_values(tf.stack([x.values, -x.values], 1)),
        lambda: tf.nn.embedding_lookup(
            a.fixed([9, 2]), x.with_values(tf.cast(tf.abs(x.values), tf.int32) % 9)
        ),
        lambda: tf.RaggedTensor.from_row_splits(
            x, tf.stack([0, x.nrows()]), validate=False
        ),
    )()


def _ragged_by_bounds(a: Attack) -> tf.RaggedTensor:
    """Returns first elements of rows, by numbers with bounds."""
    width, bounds = a.one_of(2, 3), (a.one_of(0, 0, 0, -1, 1), a.one_of(1, 2, 2, 3))
    lengths = tf.maximum(tf.minimum(a.rows([], tf.int32, 0), bounds[1]), bounds[0])
    mask = tf.range(a.one_of(width, bounds[1])) < lengths[:, None]
    rows = a.rows([width], axis=0)
    values = tf.boolean_mask(rows, mask[:, :width])
    splits = tf.concat([[0], tf.cumsum(lengths)], 0)
    return tf.RaggedTensor.from_row_splits(values, splits, validate=False)


def ragged_tensors(a: Attack) -> list:
    """Returns results of some operations on ragged tensors."""
    results, span = [], a.one_of(1, 1, 1, 2)
    for _ in range(2):
        pair = _ragged(a, span=span)
        results.append(tf.RaggedTensor.from_row_splits(*pair, validate=False))
    for _ in range(4):
        lists = [x for x in results if isinstance(x, tf.RaggedTensor)]
        pair = [lists[int(a.chance.integers(len(lists)))] for _ in "12"]
        try:
            results.append(_of_ragged(a, *pair))
        except (ValueError, TypeError, IndexError):
            continue
    return tf.nest.flatten(results, expand_composites=True)


@_for("DynamicPartition", "DynamicStitch", "ParallelDynamicStitch")
def _sorted(a, kind):
    span, number = a.one_of(1, 1, 1, 2), a.one_of(1, 2, 2, 3)
    data = a.rows(a.shape(a.one_of(0, 1)), axis=0, span=span)
    if a.happens(0.2):
        return _sorted_columns(a, kind)
    if a.happens(0.2):
        return _looked_up_in_parts(a, kind)
    parts = a.any([a.examples * span], tf.int32, most=number)
    lists = tf.dynamic_partition(data, parts, number)
    others = parts if a.happens(0.8) else a.any([a.examples], tf.int32, most=number)
    places = tf.range(a.number_of_examples() * a.one_of(1, 1, 1, span))
    places = a.any([a.examples], tf.int32) if a.happens(0.1) else places
    if a.happens(0.2):
        places = tf.reshape(
            tf.tile(tf.range(a.number_of_examples())[:, None] * span, [1, span]), [-1]
        )
    places = places * a.one_of(1, 1, 1, 2) if a.happens(0.2) else places
    numbers = tf.dynamic_partition(places, others, number)
    if a.happens(0.3):
        lists = [tf.gather(data, part) for part in numbers]
    results = [*lists, *numbers]
    lists = [tf.tanh(part) if a.happens(0.8) else part for part in lists]
    if a.happens(0.2):
        lists, numbers = lists[::-1], numbers[:: a.one_of(1, -1)]
    if a.happens(0.2):
        lists, numbers = lists[1:], numbers[1:]
    if kind == "DynamicPartition":
        return results
    return [*results, _call(kind, indices=numbers, data=lists)]


def _looked_up_in_parts(a: Attack, kind: str):
    """Returns rows that are looked up in a table of several parts, each once."""
    indices, values, shape = _filled(a, tf.int64)
    unique, places = tf.unique(values)
    delta = a.one_of(1, 1, 1, 2)
    numbers = tf.range(0, tf.size(unique) * delta, delta)
    parts = tf.cast(unique % 2, tf.int32)
    lists = tf.dynamic_partition(unique, parts, 2)
    numbers = tf.dynamic_partition(numbers, parts, 2)
    table = a.fixed([9, 2])
    rows = [tf.gather(table, part) for part in lists]
    if a.happens(0.2):
        rows, numbers = rows[:1], numbers[:1]
    if a.happens(0.2):
        rows = rows[::-1]
    stitched = raw.ParallelDynamicStitch(indices=numbers, data=rows)
    if kind == "DynamicStitch":
        stitched = raw.DynamicStitch(indices=numbers, data=rows)
    segments = tf.cast(indices[:, 0], tf.int32)
    looked_up = tf.gather(stitched, places)
    return tf.math.unsorted_segment_sum(looked_up, segments, shape[0])


def _sorted_columns(a: Attack, kind: str):
    shape = a.shape(3)
    rank = a.one_of(1, 2)
    numbers = tf.constant(a.chance.integers(0, 2, shape[:rank]).astype(np.int32))
    if kind == "DynamicPartition":
        return tf.dynamic_partition(a.any(shape), numbers, 2)
    places = [a.chance.permutation(shape[0]).astype(np.int32) for _ in "12"]
    return _call(kind, indices=places, data=[a.any(shape), a.any(shape)])


_ON_NUMBERS = (
    lambda a, x: x[:, :1],
    lambda a, x: x[:, 1:],
    lambda a, x: x[:, :-1],
    lambda a, x: x[:, ::-1],
    lambda a, x: tf.slice(x, [0, 0], [-1, 1]),
    lambda a, x: tf.slice(x, [0, a.one_of(0, 1)], [-1, -1]),
    lambda a, x: tf.slice(x, [0, 0], [1, -1]),
    lambda a, x: tf.concat([x, x[:, 1:]], 1),
    lambda a, x: tf.concat([x[:, 1:], x], 1),
    lambda a, x: tf.concat([x[:, :1], x[:, 1:]], a.one_of(1, 1, 0)),
    lambda a, x: x[:, 0],
    lambda a, x: x[:, 1],
    lambda a, x: x[:, -1],
    lambda a, x: x[:1],
    lambda a, x: tf.cast(x, tf.int32),
    lambda a, x: tf.cast(x, tf.float32),
    lambda a, x: tf.reshape(x, [-1]),
    lambda a, x: tf.squeeze(x, [1]),
    lambda a, x: tf.reshape(x, tf.shape(x)[:1]),
    lambda a, x: tf.identity(x) + 0,
    lambda a, x: tf.stop_gradient(x),
    lambda a, x: tf.gather(a.rows([2], axis=0), x),
    lambda a, x: tf.gather_nd(a.rows([2], axis=0), x),
    lambda a, x: tf.gather(a.fixed([3, 2]), x),
    lambda a, x: tf.gather(x, tf.reshape(tf.where(x[:, 0] > 0), [-1])),
    lambda a, x: tf.gather(x, tf.where(a.rows([], tf.bool, 0))[:, 0]),
    lambda a, x: tf.fill(tf.shape(x)[:1], 1.0),
    lambda a, x: tf.ones_like(x),
    lambda a, x: tf.range(tf.shape(x)[0]),
    lambda a, x: tf.shape(x),
    lambda a, x: a.rows([2], axis=0) * tf.cast(tf.shape(x)[0], tf.float32),
    lambda a, x: tf.zeros([a.examples, tf.shape(x)[0]]),
)


def numbers_of_entries(a: Attack) -> list[tf.Tensor]:
    """Returns results of some operations on the indices of a sparse tensor."""
    results = [a.entries([a.one_of(1, a.examples)][: a.one_of(0, 1)])]
    for _ in range(4):
        step = a.one_of(*_ON_NUMBERS)
        try:
            results.append(step(a, results[int(a.chance.integers(len(results)))]))
        except (ValueError, TypeError, IndexError):
            continue
    return results


# Blocks.


@_for("SpaceToBatchND", "SpaceToBatch", "BatchToSpaceND", "BatchToSpace")
def _space_and_batch(a, kind):
    images, block = _images(a, 4), a.one_of(1, 2, 2)
    if not kind.endswith("ND"):
        block = 2
    general = {"block_shape": [block, 2], "paddings": [[0, 0], [0, 0]]}
    if a.happens(0.3):
        general = {"block_shape": [block], "paddings": [[0, 0]]}
    plain = {"block_size": block, "paddings": [[0, 0], [0, 0]]}
    if kind.endswith("ND"):
        blocks = raw.SpaceToBatchND(input=images, **general)
        back = {"block_shape": general["block_shape"][:: a.one_of(1, -1)]}
        back["crops"] = general["paddings"]
        return blocks, raw.BatchToSpaceND(input=tf.tanh(blocks), **back)
    blocks = raw.SpaceToBatch(input=images, **plain)
    if a.happens(0.3):
        blocks = tf.concat([images, images] * 2, 0)
    crops = plain["paddings"]
    return blocks, raw.BatchToSpace(input=blocks * 2, block_size=2, crops=crops)


_ON_BLOCKS = (
    lambda a, z, n: tf.split(z, 4, 0),
    lambda a, z, n: tf.split(tf.concat([z, -z], 0), 2, 0),
    lambda a, z, n: raw.BatchToSpaceND(
        input=tf.tanh(
            raw.SpaceToBatchND(
                input=tf.tile(z, [1, 2]), block_shape=[2], paddings=[[0, 0]]
            )
        ),
        block_shape=[a.one_of(2, 2, 2, 4)],
        crops=[[0, 0]],
    ),
    lambda a, z, n: tf.split(z, 2, 0),
    lambda a, z, n: tf.split(z, 3, 0),
    lambda a, z, n: tf.split(z, [n, a.one_of(n, -1)], 0),
    lambda a, z, n: tf.split(z, [2 * n, a.one_of(n, -1)], 0),
    lambda a, z, n: tf.split(z, [a.one_of(n, 1), n, n], 0),
    lambda a, z, n: [z[:n], z[n:]],
    lambda a, z, n: [z[n : 2 * n], z[2 * n :]],
    lambda a, z, n: tf.reshape(z, [2, -1, z.shape[1]]),
    lambda a, z, n: tf.reshape(z, [2, n, z.shape[1]]),
    lambda a, z, n: tf.reshape(z, [-1, 2, z.shape[1]]),
    lambda a, z, n: tf.reshape(z, [2, -1, a.one_of(1, 2), z.shape[1]]),
    lambda a, z, n: tf.reshape(z, [2, n // a.one_of(1, 2), 2, z.shape[1]]),
    lambda a, z, n: tf.reshape(z, [-1, *z.shape[-1:]]),
    lambda a, z, n: tf.reshape(z, [-1, *z.shape[-2:]]),
    lambda a, z, n: tf.reshape(z, [n, -1]),
    lambda a, z, n: tf.matmul(z, a.any([z.shape[1], 2])),
    lambda a, z, n: tf.nn.softmax(z),
    lambda a, z, n: tf.nn.softmax(z, 0),
    lambda a, z, n: z * a.any([2 * a.examples, 1]),
    lambda a, z, n: z + tf.concat([z, z], 0)[: tf.shape(z)[0]],
    lambda a, z, n: z * tf.cast(tf.shape(z)[0], z.dtype),
    lambda a, z, n: tf.where(z > 0.5),
    lambda a, z, n: tf.boolean_mask(z, z[:, 0] > 0.5),
    lambda a, z, n: tf.gather(a.fixed([3, 2]), tf.cast(z * 3, tf.int32)),
    lambda a, z, n: tf.transpose(z),
    lambda a, z, n: tf.reverse(z, [0]),
    lambda a, z, n: tf.concat([z, z], 1),
    lambda a, z, n: tf.concat([z, z], 0),
    lambda a, z, n: tf.tile(z, [2, 1]),
    lambda a, z, n: tf.tile(z, [1, 2]),
    lambda a, z, n: tf.reduce_sum(z, 0),
    lambda a, z, n: tf.unique(tf.cast(z[:, 0] * 3, tf.int32)),
    lambda a, z, n: z[: a.examples],
    lambda a, z, n: z[1:],
)


def blocks_of_rows(a: Attack) -> list[tf.Tensor]:
    """Returns results of some operations on rows that are joined."""
    shape, span = [a.length()], a.one_of(1, 1, 2)
    first = a.rows(shape, axis=0, span=span)
    second = a.rows(shape, axis=0, span=a.one_of(span, span, 1))
    parts = a.one_of([first, second], [first, second, first], [second, first])
    blocks = tf.concat(parts, 0) if a.happens(0.7) else tf.tile(first, [2, 1])
    if a.happens(0.3):  # words before examples
        inner = a.one_of([], [], [2])
        words = a.rows([a.one_of(2, 3), *inner, *shape], axis=1, span=span)
        blocks = tf.reshape(words, [-1, *shape])
    results = [blocks]
    for _ in range(4):
        step = a.one_of(*_ON_BLOCKS)
        try:
            tensor = results[int(a.chance.integers(len(results)))]
            results += tf.nest.flatten(step(a, tensor, a.number_of_examples() * span))
        except (ValueError, TypeError, IndexError):
            continue
    return results


# Loops with a round for each example.

_IN_ROUNDS = (
    lambda a, x, z, w: z * 2,
    lambda a, x, z, w: tf.reduce_sum(z) * w,
    lambda a, x, z, w: z + tf.reduce_max(w),
    lambda a, x, z, w: tf.cumsum(z) + tf.cast(tf.shape(z)[0], z.dtype),
    lambda a, x, z, w: z * tf.random.uniform([]),
    lambda a, x, z, w: z + x[0],
    lambda a, x, z, w: z * tf.reduce_sum(x),
    lambda a, x, z, w: z * tf.cast(tf.shape(x)[0], z.dtype),
    lambda a, x, z, w: tf.cond(tf.reduce_sum(z) > 1.5, lambda: z, lambda: -z),
    lambda a, x, z, w: tf.map_fn(tf.cumsum, z),
    lambda a, x, z, w: tf.gather(a.fixed([3, 2]), tf.cast(z * 3, tf.int32)),
    lambda a, x, z, w: tf.while_loop(lambda y: tf.reduce_sum(y) < 9.0,
                                     lambda y: [y * 2], [z])[0],
)  # fmt: skip


def rounds_of_examples(a: Attack) -> list[tf.Tensor]:
    """Returns results of loops that read or write a row in each round."""
    tail, span, axis = a.shape(2), a.one_of(1, 1, 2), a.one_of(0, 0, 0, 1)
    x, y = a.rows(tail, axis=axis, span=span), a.rows([], axis=0, span=span)
    step = a.one_of(*_IN_ROUNDS)

    def round_of(pair):
        return step(a, x, *pair)

    way = a.one_of("map", "map", "vectorized", "scan", "own")
    if way == "map":
        return [tf.map_fn(round_of, (x, y), tf.float32)]
    if way == "vectorized":
        return [tf.vectorized_map(round_of, (x, y))]
    if way == "scan":
        return [tf.scan(lambda before, z: before + z, x)]
    number, first, by = tf.shape(x)[0], a.one_of(0, 0, 0, 1), a.one_of(1, 1, 1, 2)
    last = a.one_of(number, number, number, number - 1, a.examples)
    places = (
        lambda i: i,
        lambda i: i,
        lambda i: number - 1 - i,
        lambda i: 0,
        lambda i: tf.maximum(i - 1, 0),
    )
    reads, writes = a.one_of(*places), a.one_of(*places)
    rows = tf.TensorArray(tf.float32, number, clear_after_read=False).unstack(x)
    results = tf.TensorArray(tf.float32, number, element_shape=x.shape[1:])
    carries = a.happens(0.3)

    def body(i, results, sum_of_rows):
        row = rows.read(reads(i))
        value = row + sum_of_rows if carries else row * 2
        return i + by, results.write(writes(i), value), sum_of_rows + tf.reduce_sum(row)

    loop = tf.while_loop(lambda i, *_: i < last, body, (first, results, 0.0))
    return [loop[1].stack(), loop[2]]


# Losses and sequences.


@_for("InTopK", "InTopKV2")
def _is_among_the_largest(a, kind):
    shape = [a.one_of(a.examples, 1), a.length()]
    labels = a.any(shape[:1], tf.int32)
    return _call(kind, predictions=a.any(shape), targets=labels, k=a.one_of(1, 2))


@_for("SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits")
def _cross_entropy(a, kind):
    shape = [a.one_of(a.examples, 1), 3]
    if kind.startswith("Sparse"):
        labels = a.any(shape[:1], tf.int32)
    else:
        labels = a.any([a.one_of(a.examples, 1), 3])
    return _call(kind, features=a.any(shape), labels=labels)


@_for("ReverseSequence")
def _reverse_sequence(a, kind):
    axes = a.chance.permutation(3).tolist()
    shape = [a.examples + 1] * 3
    shape[axes[a.one_of(1, 1, 2)]] = a.examples
    axes = {"batch_dim": axes[1], "seq_dim": axes[0]}
    lengths = a.any([shape[axes["batch_dim"]]], tf.int32)
    return raw.ReverseSequence(input=a.any(shape), seq_lengths=lengths, **axes)


# Lists of tensors, branches, loops and functions.

_LIST_RULES = (
    *("TensorListSetItem", "TensorListPushBack", "TensorListFromTensor"),
    *("TensorListGetItem", "TensorListStack", "TensorListGather", "TensorListPopBack"),
    *("TensorListLength", "TensorListElementShape", "TensorListReserve"),
    "EmptyTensorList",
)


@_for(*_LIST_RULES)
def _list(a, kind):
    item, dtype = a.any([a.examples, a.length()]), tf.float32
    shape = a.sizes([a.examples, item.shape.as_list()[1] or a.length()])
    free = {"element_shape": tf.constant([-1, -1]), "element_dtype": dtype}
    if kind == "TensorListFromTensor" or a.happens(0.3):
        tensor = a.any([a.examples, a.examples, 2])
        handle = raw.TensorListFromTensor(tensor=tensor, element_shape=[-1, -1])
    elif kind in ("TensorListSetItem", "TensorListReserve") or a.happens():
        number = a.number_of_examples() if a.happens(0.2) else tf.constant(2)
        element_shape = shape if a.happens(0.3) else free["element_shape"]
        handle = raw.TensorListReserve(
            element_shape=element_shape, num_elements=number, element_dtype=dtype
        )
        for i in range(2):
            handle = raw.TensorListSetItem(
                input_handle=handle, index=i, item=a.any([a.examples, 2]) if i else item
            )
    else:
        element_shape = shape if a.happens(0.3) else free["element_shape"]
        handle = raw.EmptyTensorList(
            element_shape=element_shape, element_dtype=dtype, max_num_elements=5
        )
        for other in (item, a.any([a.examples, 2])):
            handle = raw.TensorListPushBack(input_handle=handle, tensor=other)
    list_shape = raw.TensorListElementShape(input_handle=handle, shape_type=tf.int32)
    if kind == "TensorListElementShape":
        return list_shape
    if kind == "TensorListPopBack":
        handle, popped = raw.TensorListPopBack(input_handle=handle, **free)
        return popped, raw.TensorListLength(input_handle=handle)
    return [
        raw.TensorListLength(input_handle=handle),
        raw.TensorListGetItem(input_handle=handle, index=a.one_of(0, 1), **free),
        raw.TensorListGather(input_handle=handle, indices=[1, 0], **free),
        raw.TensorListStack(input_handle=handle, **free),
    ][:: a.one_of(1, 1, 2)]


def _step(a: Attack):
    """Returns a random function of a tensor of a shape."""
    return a.one_of(
        tf.tanh,
        lambda z: z + 1,
        lambda z: tf.reverse(z, [1]),
        lambda z: tf.nn.softmax(z, -1),
        lambda z: z - tf.reduce_mean(z, 0, keepdims=True),
        lambda z: z - tf.reduce_mean(z, 1, keepdims=True),
        lambda z: z * tf.cast(tf.shape(z)[1], z.dtype),
        lambda z: tf.cumsum(z, 0),
    )


@_for("If", "StatelessIf", "Case", "StatelessCase", "While", "StatelessWhile")
@_for("PartitionedCall", "StatefulPartitionedCall")
def _control_flow(a, kind):
    tensor, steps = a.any([a.examples, a.examples]), [_step(a), _step(a)]
    if "Call" in kind:
        return tf.function(lambda z: steps[1](steps[0](z)))(tensor)
    if "While" in kind:
        return tf.while_loop(
            lambda i, *_: i < 2,
            lambda i, y, z: (i + 1, steps[0](z), steps[1](y)),
            (0, tensor, a.any([a.examples, a.examples])),
        )[1:]
    chosen = v1.placeholder_with_default(1, [])
    if "Case" in kind:
        ways = [lambda step=step: step(tensor) for step in steps]
        return tf.switch_case(chosen, ways)
    ways = [lambda: steps[0](tensor), lambda: steps[1](tensor)]
    return tf.cond(chosen > 0, *ways)


# Sizes.


@_for("Shape", "ShapeN", "Size", "Rank", "BroadcastArgs", "BroadcastGradientArgs")
def _of_shape(a, kind):
    tensor, _ = _tensor(a, (1, 2, 3))
    if kind == "ShapeN":
        return raw.ShapeN(input=[tensor, a.any(a.shape(2))])
    if not kind.startswith("Broadcast"):
        return getattr(raw, kind)(input=tensor)
    other = tf.shape(a.any(a.shape(2)))
    if kind == "BroadcastArgs":
        shape = tf.shape(tensor)
        return raw.BroadcastArgs(s0=shape, s1=shape if a.happens() else other)
    shape = tf.shape(tensor)
    axes = raw.BroadcastGradientArgs(s0=shape, s1=other if a.happens(0.7) else shape)
    # Of those with the length 1 there may be more, which changes nothing.
    return tf.reduce_sum(tensor, axes.r0, keepdims=True)


def some_sizes(a: Attack) -> list[tf.Tensor]:
    """Returns vectors that are computed from shapes, some operations later."""
    tensors = [_tensor(a, (1, 2, 3))[0] for _ in "123"]
    sizes = [tf.shape(tensor, a.one_of(tf.int32, tf.int64)) for tensor in tensors]
    sizes = [tf.cast(size, tf.int32) for size in sizes]
    sizes.append(tf.constant([2, 3, 6]))
    for _ in range(4):
        one, other = (sizes[int(a.chance.integers(len(sizes)))] for _ in "12")
        try:
            sizes.append(a.one_of(*_OF_SIZES)(a, one, other))
        except (ValueError, TypeError, IndexError, ZeroDivisionError):
            continue
    return sizes[3:]


_OF_SIZES = (
    lambda a, x, y: x + y[:1],
    lambda a, x, y: x - y[-1:],
    lambda a, x, y: x * y[:1],
    lambda a, x, y: x // tf.maximum(y[:1], 1),
    lambda a, x, y: x // tf.constant(a.one_of(1, 2, 3)),
    lambda a, x, y: x % tf.constant(a.one_of(2, 3)),
    lambda a, x, y: tf.maximum(x, a.one_of(0, 1, 2)),
    lambda a, x, y: tf.minimum(x, y[:1]),
    lambda a, x, y: tf.concat([x, y], 0),
    lambda a, x, y: tf.stack([x[0], y[0]]),
    lambda a, x, y: tf.reduce_prod(x, keepdims=True),
    lambda a, x, y: tf.reshape(tf.reduce_prod(y[:2]), [1]),
    lambda a, x, y: tf.gather(x, [0, -1 % int(x.shape[0])]),
    lambda a, x, y: tf.gather(tf.stack([x, x + 1]), [1, 0], batch_dims=0)[0],
    lambda a, x, y: tf.gather(tf.stack([x[:1], y[:1]]), [[0], [0]], batch_dims=1)[:, 0],
    lambda a, x, y: x[a.one_of(0, 1, -1) :],
    lambda a, x, y: x[:: a.one_of(1, -1, 2)],
    lambda a, x, y: x[a.one_of(0, -1)][None],
    lambda a, x, y: tf.slice(x, [a.one_of(0, 1)], [a.one_of(-1, 1)]),
    lambda a, x, y: tf.slice(tf.stack([x, x * 2]), [0, 0], [2, 1])[:, 0],
    lambda a, x, y: tf.split(x, [1, -1], 0)[a.one_of(0, 1)],
    lambda a, x, y: tf.split(x, [-1, 1], 0)[a.one_of(0, 1)],
    lambda a, x, y: tf.split(tf.stack([x, x]), 2, 0)[1][0],
    lambda a, x, y: tf.stack(tf.unstack(x)[::-1]),
    lambda a, x, y: tf.squeeze(tf.expand_dims(x, a.one_of(0, 1)), a.one_of(0, 1)),
    lambda a, x, y: tf.dynamic_stitch([[0], [a.one_of(0, 1)]], [x[:1], y[:1]]),
    lambda a, x, y: tf.fill([2], x[0]),
    lambda a, x, y: tf.reshape(tf.stack([x, x + 2]), [-1]),
    lambda a, x, y: tf.cast(tf.cast(x, tf.int8), tf.int32),
    lambda a, x, y: tf.range(1, 4) * x[0],
    lambda a, x, y: tf.stop_gradient(tf.identity(x)),
    lambda a, x, y: tf.where(x > 1, x, x),
    lambda a, x, y: tf.where(x < a.one_of(0, 2, 3), x + 1, x),
    lambda a, x, y: x + tf.cast(y[:1] >= 2, tf.int32),
    lambda a, x, y: tf.reduce_max(tf.stack([x[0], y[0]]), keepdims=True),
    lambda a, x, y: tf.minimum(a.one_of(2, 3), tf.maximum(a.one_of(2, 3), x[0]))[None],
)
