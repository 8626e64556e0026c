"""Each rule of the analysis agrees with the numbers.

n = number of examples, T = 4 words, W = 6 numbers a word.
"""

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum.microbatch.repeatable import changes_something, is_repeatable
from estimator_accum.rows.analysis import Analysis
from estimator_accum.rows.declaration import per_example
from estimator_accum.rows.entries import states_of_ragged, states_of_sparse
from estimator_accum.rows.rules.elementwise import ELEMENTWISE
from estimator_accum.rows.rules.table import RULES
from estimator_accum.rows.sizes import N, Size
from estimator_accum.rows.states import MIXED
from tests.helpers.oracles.rule_inputs import NEEDED

v1, raw = tf.compat.v1, tf.raw_ops
_GROUPS = (1, 3, 4)
_DTYPES = (tf.float32, tf.int32, tf.bool, tf.string, tf.complex64)
_numbers = np.random.default_rng(0)
_ARRAYS = {
    "x": _numbers.normal(size=(8, 4, 6)).astype(np.float32),
    "y": _numbers.normal(size=(8,)).astype(np.float32),
    "ids": _numbers.integers(0, 4, (8, 4)).astype(np.int32),
    "length": _numbers.integers(1, 5, (8,)).astype(np.int32),
    "images": _numbers.normal(size=(8, 6, 6, 4)).astype(np.float32),
    "texts": np.array([[f"a{i}", "b"] for i in range(8)]),
}


def _states(make, is_dynamic=False, is_run=True):
    """Returns the tensors of `make`, their states, and values for 8 and for groups."""
    with tf.Graph().as_default():
        shapes = {name: [None, *a.shape[1:]] for name, a in _ARRAYS.items()}
        if is_dynamic:  # the number of words is not known either
            shapes["x"], shapes["ids"] = [None, None, 6], [None, None]
        parts = {
            name: v1.placeholder(tf.as_dtype(array.dtype.type), shapes[name], name)
            if array.dtype.kind != "U"
            else v1.placeholder(tf.string, shapes[name], name)
            for name, array in _ARRAYS.items()
        }
        names = make.__code__.co_varnames[: make.__code__.co_argcount]
        tensors = tf.nest.flatten(make(*(parts[name] for name in names)))
        analysis = Analysis(parts.values())
        analysis.analyze(tensors)
        states = [analysis.state(tensor) for tensor in tensors]
        assert analysis.origins or not any(state.kind == "mixed" for state in states)
        with v1.Session() as session:
            session.run([v1.global_variables_initializer(), v1.tables_initializer()])
            begins = np.cumsum([0, *_GROUPS])
            slices = [slice(0, 8), *map(slice, begins, begins[1:])]
            is_variant = any(t.dtype in (tf.variant, tf.resource) for t in tensors)
            values = [
                session.run(
                    tensors, {parts[name]: a[part] for name, a in _ARRAYS.items()}
                )
                for part in slices
                if is_run and not is_variant
            ]
        types = {operation.type for operation in tensors[0].graph.get_operations()}
    return states, values, types


def _assert_rows(make, axis, span=1, is_random=False, **options):
    states, values, types = _states(make, **options)
    for i, state in enumerate(states):
        assert (state.kind, state.axis) == ("rows", axis), state
        if not options:
            assert int(state.span) == span
        if is_random or not values:
            continue
        together, *apart = (results[i] for results in values)
        joined = np.concatenate(apart, axis)
        if joined.dtype.kind in "fc":
            np.testing.assert_allclose(joined, together, rtol=1e-4, atol=1e-5)
        else:
            np.testing.assert_array_equal(joined, together)
    return types


def _static(shape):
    return tf.reshape(tf.range(1.0, np.prod(shape) + 1) % 3 + 1, shape)


def _table():
    keys, values = tf.constant(["a1", "b"]), tf.constant([3, 5], tf.int64)
    initializer = tf.lookup.KeyValueTensorInitializer(keys, values)
    return tf.lookup.StaticHashTable(initializer, 0)


def _with_shape(x, shape):
    x.set_shape(shape)
    return x


def _rows_by_number(x, following):
    """Reads rows by a number that begins at 0; returns as many as there are examples."""
    n = tf.shape(x)[0]
    taken = tf.TensorArray(tf.float32, n).unstack(x)
    return tf.while_loop(
        lambda i, *_: i < n,
        lambda i, j, rows: (i + 1, following(j), rows.write(i, taken.read(j))),
        (0, 0, tf.TensorArray(tf.float32, n)),
    )[2].stack()


def _loop(x, body):
    return tf.while_loop(lambda i, _: i < 3, lambda i, z: (i + 1, body(z)), (0, x))[1]


def _beside_entries(x, ids, caller):
    """Returns the results of a caller of x and of entries, and of entries alone."""
    entries = tf.cast(_even(ids).values, tf.float32)
    return {
        "function": lambda: tf.function(_of_both)(x, entries),
        "branch": lambda: tf.cond(
            _is_training(), lambda: _of_both(x, entries), lambda: (x, entries)
        ),
        "loop": lambda: tf.while_loop(
            lambda i, *_: i < 3,
            lambda i, y, z: (i + 1, *_of_both(y, z)),
            (0, x, entries),
        )[1:],
    }[caller]()


def _of_both(x, entries):
    return tf.tanh(x), entries * 2


def _cell(x):
    return v1.nn.dynamic_rnn(v1.nn.rnn_cell.GRUCell(3), x, dtype=tf.float32)[0]


def _boxes(x):
    return tf.sigmoid(x[:, :, :4]) / 4 + [0.0, 0.0, 0.5, 0.5]


def _checked(x, *checks):
    """Returns rows of a function that checks something of them."""

    @tf.function(autograph=False)
    def function(x):
        for check in checks:
            tf.debugging.Assert(check(x), [x])
        return x * 2

    return function(x)


def _checked_if(x, condition, check, is_else=False):
    """Returns rows of a function that checks something of them in a branch."""

    @tf.function(autograph=False)
    def function(x):
        branches = [lambda: v1.Assert(check(x), [x]), tf.no_op]
        tf.cond(condition(x), *branches[:: -1 if is_else else 1])
        return x * 2

    return function(x)


# Name: (tensors of the parts, axis of the examples, rows for each example).
_ROWS = {
    "if there are examples": (
        lambda x: x * tf.where(tf.shape(x)[0] > 0, 2.0, 3.0), 0, 1),
    "reduced": (lambda x: [tf.reduce_sum(x, 2), tf.reduce_max(x, [1, 2])], 0, 1),
    "reduced before": (lambda x: tf.reduce_mean(tf.transpose(x, [1, 0, 2]), 0), 0, 1),
    "reduced, kept": (lambda x: tf.reduce_min(x, 1, keepdims=True), 0, 1),
    "products": (lambda x: [tf.reduce_prod(x, -1), tf.norm(x, axis=1)], 0, 1),
    "all and any": (
        lambda x: [tf.reduce_all(x > 0, 1), tf.reduce_any(x > 0, [1, 2])], 0, 1
    ),
    "EuclideanNorm": (lambda x: raw.EuclideanNorm(input=x, axis=[1, 2]), 0, 1),
    "broadcast": (lambda x, y: x * y[:, None, None] + _static([4, 6]), 0, 1),
    "turned back": (
        lambda x: tf.transpose(x, tf.math.invert_permutation([0, 2, 1])), 0, 1
    ),
    "broadcast in time": (lambda x, y: tf.transpose(x, [1, 2, 0]) + y, 2, 1),
    "best": (lambda x: [tf.argmax(x, 2), tf.argmin(x, 1)], 0, 1),
    "scans": (
        lambda x: [
            tf.cumsum(x, 1), tf.math.cumprod(x, 2), tf.reverse(x, [1]),
            tf.roll(x, [1], [2]), raw.CumulativeLogsumexp(x=x, axis=1),
        ], 0, 1,
    ),
    "of the last axis": (
        lambda x: [
            tf.nn.softmax(x), tf.nn.log_softmax(x), *tf.nn.top_k(x, 2),
            raw.MatrixDiag(diagonal=x),
            raw.MatrixDiagV2(diagonal=x, k=0, num_rows=-1, num_cols=-1,
                             padding_value=0.0), tf.linalg.diag(x),
        ], 0, 1,
    ),
    "diagonals": (
        lambda images: [
            tf.linalg.diag_part(images), raw.MatrixDiagPart(input=images),
            raw.MatrixDiagPartV2(input=images, k=0, padding_value=0.0),
        ], 0, 1,
    ),
    "matrices": (
        lambda images: [
            tf.linalg.band_part(images, 1, 1),
            *(
                raw_op(tf.matmul(images, images, transpose_b=True) + 9 * tf.eye(6))
                for raw_op in (tf.linalg.cholesky, tf.linalg.inv, tf.linalg.det)
            ),
            tf.linalg.slogdet(images[:, :, :4])[1],
            tf.linalg.svd(images)[0], tf.abs(tf.linalg.qr(images)[1]),
            tf.linalg.eigh(tf.matmul(images, images, transpose_b=True))[0],
            *(tf.abs(f(tf.cast(images, tf.complex64)))
              for f in (tf.signal.fft, tf.signal.ifft)),
            tf.abs(tf.signal.rfft(images)), tf.signal.irfft(tf.signal.rfft(images)),
        ], 0, 1,
    ),
    "pixels": (
        lambda images: [
            *(f(images[..., :3]) for f in (tf.image.rgb_to_hsv, tf.image.hsv_to_rgb)),
            raw.AdjustHue(images=images[..., :3], delta=0.1),
            raw.AdjustSaturation(images=images[..., :3], scale=0.5),
        ], 0, 1,
    ),
    "images and boxes": (
        lambda images, x: [
            raw.ImageProjectiveTransformV2(
                images=images, transforms=tf.reshape(x[:, :2, :4], [-1, 8]),
                output_shape=[3, 3], interpolation="BILINEAR"),
            raw.ImageProjectiveTransformV3(
                images=images, transforms=_static([1, 8]), output_shape=[3, 3],
                fill_value=0.0, interpolation="BILINEAR"),
            raw.DrawBoundingBoxes(images=images, boxes=_boxes(x)),
            raw.DrawBoundingBoxesV2(
                images=images, boxes=_boxes(x), colors=_static([2, 4])),
            *(f(input=images, size=[2, 2], offsets=x[:, 0, :2], noise="zero",
                uniform_noise=False) for f in (raw.ExtractGlimpse, raw.ExtractGlimpseV2)),
            *tf.image.combined_non_max_suppression(
                _boxes(x)[:, :, None], x[:, :, 4:], 2, 3),
            *raw.MaxPoolWithArgmax(input=images, ksize=[1, 2, 2, 1],
                                   strides=[1, 2, 2, 1], padding="VALID"),
        ], 0, 1,
    ),
    "crops by number": (
        lambda images, x: tf.image.crop_and_resize(
            images, _boxes(x)[:, 0], tf.range(tf.shape(x)[0]), [3, 3]), 0, 1,
    ),
    "several crops by number": (
        lambda images, x: tf.image.crop_and_resize(
            images, tf.reshape(_boxes(x), [-1, 4]), tf.repeat(
                tf.range(tf.shape(x)[0]), 4), [3, 3]), 0, 4,
    ),
    "numbers among others": (
        lambda x, ids, length: [
            tf.searchsorted(tf.cumsum(tf.abs(x), 2), x),
            tf.searchsorted(tf.cumsum(tf.abs(x), 2), x, "right"),
            tf.linalg.cross(x[..., :3], x[..., 3:]),
            tf.math.in_top_k(length, x[:, 0], 2),
            raw.InTopK(predictions=x[:, 0], targets=length, k=2),
            *tf.math.approx_max_k(x[:, 0], 2),
            tf.math.bincount(ids, minlength=4, maxlength=4, axis=-1),
            tf.math.bincount(ids, x[..., 0], 3, 3, axis=-1),
            tf.math.bincount(ids, minlength=4, maxlength=4, axis=-1, binary_output=True),
        ], 0, 1,
    ),
    "parts of texts": (
        lambda texts, length: [
            tf.strings.substr(texts, 0, 1), tf.strings.reduce_join(texts, 1),
            tf.strings.substr(texts[:, 0], length % 2, length),
        ], 0, 1,
    ),
    "segments of columns": (
        lambda x: [
            *(f(tf.transpose(x, [1, 0, 2]), [0, 0, 1, 1]) for f in (
                tf.math.segment_sum, tf.math.segment_mean, tf.math.segment_max,
                tf.math.segment_min, tf.math.segment_prod)),
            *(f(tf.transpose(x, [1, 0, 2]), [0, 1, 0, 1], 2) for f in (
                tf.math.unsorted_segment_sum, tf.math.unsorted_segment_max,
                tf.math.unsorted_segment_min, tf.math.unsorted_segment_prod)),
            *(f(tf.transpose(x, [1, 0, 2]), [0, 3], [0, 0]) for f in (
                tf.sparse.segment_sum, tf.sparse.segment_mean,
                tf.sparse.segment_sqrt_n)),
            *(f(tf.transpose(x, [1, 0, 2]), [0, 3], [0, 0], 2) for f in (
                tf.sparse.segment_sum, tf.sparse.segment_mean,
                tf.sparse.segment_sqrt_n)),
        ], 1, 1,
    ),
    "segments of texts": (lambda texts: tf.strings.unsorted_segment_join(
        tf.transpose(texts), [0, 0], 1), 1, 1),
    "dilated": (
        lambda images: [
            tf.nn.conv2d(images, _static([2, 2, 4, 2]), 1, "SAME", dilations=2),
            tf.nn.convolution(images, _static([2, 2, 4, 2]), padding="SAME", dilations=2),
            raw.BatchToSpace(input=tf.tanh(raw.SpaceToBatch(
                input=images, paddings=[[0, 0], [0, 0]], block_size=2)),
                crops=[[0, 0], [0, 0]], block_size=2),
        ], 0, 1,
    ),
    "two views": (
        lambda x: [
            *tf.split(tf.tanh(tf.concat([x, -x], 0)), 2),
            *tf.split(tf.tile(x, [3, 1, 1]) + tf.concat([x, -x, x], 0), 3),
            *(z for views in [tf.nn.softmax(tf.concat([x, -x], 0))]
              for n in [tf.shape(x)[0]] for z in (views[:n], views[n:])),
            *(z for n in [tf.shape(x)[0]] for lengths in ([n, n], [n, -1])
              for z in tf.split(tf.concat([x, -x], 0), lengths)),
        ], 0, 1,
    ),
    "joined before the examples": (lambda y: tf.concat([y[None], -y[None]], 0), 1, 1),
    "dilated and transposed": (
        lambda images: [
            tf.nn.atrous_conv2d_transpose(
                images, _static([2, 2, 3, 4]), [tf.shape(images)[0], 6, 6, 3], 2, "SAME"),
        ], 0, 1,
    ),
    "own places of own places": (
        lambda x, length: [
            tf.gather_nd(x, tf.gather_nd(
                tf.concat([_places(x)[:, None], length[:, None, None] - 1], 2),
                tf.concat([_places(x), 0 * length[:, None]], 1))),
            tf.scatter_nd(tf.concat([_places(x), length[:, None] - 1], 1), x[:, 0],
                          tf.stack([tf.shape(x)[0], 4, 6])),
        ], 0, 1,
    ),
    "two views, dilated": (
        lambda images: tf.split(tf.nn.convolution(
            tf.concat([images, -images], 0), _static([2, 2, 4, 2]), padding="SAME",
            dilations=2), 2), 0, 1,
    ),
    "words before examples": (
        lambda x: [
            tf.reshape(tf.tanh(tf.reshape(tf.transpose(x, [1, 0, 2]), shape)), back)
            for n in [tf.shape(x)[0]] for shape in ([-1, 6], [4 * n, 6])
            for back in ([4, -1, 6], [4, n, 6])
        ] + [
            tf.keras.layers.Dense(3)(tf.transpose(x, [1, 0, 2])),
            tf.reshape(tf.reshape(tf.transpose(x, [1, 0, 2]), [-1]), [4, -1, 6]),
        ], 1, 1,
    ),
    "two views, stacked": (
        lambda x: tf.reshape(tf.concat([x, -x], 0), [2, tf.shape(x)[0], 4, 6]), 1, 1
    ),
    "signals": (
        lambda x: [
            *(tf.abs(f(x[:, 0])) for f in (tf.signal.rfft, tf.signal.dct)),
            *(tf.abs(f(tf.cast(x[:, 0], tf.complex64)))
              for f in (tf.signal.fft, tf.signal.ifft)),
            tf.signal.irfft(tf.signal.rfft(x[:, 0])),
            tf.abs(tf.signal.stft(x[:, 0], 4, 2)),
            *(tf.abs(f(tf.cast(x, tf.complex64)))
              for f in (tf.signal.fft2d, tf.signal.ifft2d)),
            tf.signal.irfft2d(tf.signal.rfft2d(x)), tf.signal.fftshift(x, [1]),
            *(tf.abs(f(tf.cast(x[:, None], tf.complex64)))
              for f in (tf.signal.fft3d, tf.signal.ifft3d)),
            raw.IRFFT3D(input=raw.RFFT3D(input=x[:, None], fft_length=[1, 4, 6]),
                        fft_length=[1, 4, 6]),
        ], 0, 1,
    ),
    "columns of an equation": (
        lambda y: [
            f(9 * tf.eye(1), y[None])
            for f in (tf.linalg.solve, tf.linalg.triangular_solve)
        ], 1, 1,
    ),
    "reversed words, examples in between": (
        lambda x: raw.ReverseSequence(
            input=x, seq_lengths=[1, 2, 3, 4, 2, 1], seq_dim=1, batch_dim=2), 0, 1
    ),
    "pairs of matrices": (
        lambda images: [
            tf.linalg.solve(images[:, :, :4] + 9 * tf.eye(4), images[:, :, :4]),
            tf.linalg.triangular_solve(images[:, :, :4] + 9 * tf.eye(4),
                                       images[:, :, :4]),
            tf.linalg.set_diag(images, images[:, :, 0, :] * 2),
            raw.MatrixSetDiag(input=images, diagonal=images[:, :, 0, :]),
        ], 0, 1,
    ),
    "images": (
        lambda images: [
            tf.nn.conv2d(images, _static([3, 3, 4, 2]), 1, "SAME"),
            tf.nn.depthwise_conv2d(images, _static([2, 2, 4, 1]), [1] * 4, "SAME"),
            tf.nn.max_pool2d(images, 2, 2, "VALID"),
            tf.nn.avg_pool2d(images, 2, 2, "VALID"),
            raw.MaxPoolV2(input=images, ksize=[1, 2, 2, 1], strides=[1] * 4,
                          padding="VALID"),
            tf.nn.lrn(images), tf.image.resize(images, [3, 3]),
            *(tf.image.resize(images, [3, 3], method)
              for method in ("nearest", "bicubic", "area")),
            tf.nn.space_to_depth(images, 2), tf.nn.depth_to_space(images, 2),
            tf.image.extract_patches(images, [1, 2, 2, 1], [1] * 4, [1] * 4, "VALID"),
            raw.AdjustContrastv2(images=images, contrast_factor=2.0),
            raw.Dilation2D(input=images, filter=_static([2, 2, 4]), strides=[1] * 4,
                           rates=[1] * 4, padding="SAME"),
            tf.nn.conv3d(images[:, None], _static([1, 2, 2, 4, 2]), [1] * 5, "SAME"),
            tf.nn.max_pool3d(images[:, None], 1, 1, "SAME"),
            tf.nn.avg_pool3d(images[:, None], 1, 1, "SAME"),
            tf.nn.bias_add(images, _static([4])),
            raw.BiasAddV1(value=images, bias=_static([4])),
        ], 0, 1,
    ),
    "images back": (
        lambda images: [
            *tf.gradients(tf.nn.max_pool2d(images, 2, 2, "VALID") ** 2, images),
            *tf.gradients(tf.nn.avg_pool2d(images, 2, 2, "VALID") ** 2, images),
            *tf.gradients(tf.nn.conv2d(images, _static([3, 3, 4, 2]), 1, "SAME"),
                          images),
            *tf.gradients(tf.image.resize(images, [3, 3]) ** 2, images),
            *tf.gradients(tf.nn.depthwise_conv2d(
                images, _static([2, 2, 4, 1]), [1] * 4, "SAME") ** 2, images),
            *tf.gradients(tf.nn.conv3d(
                images[:, None], _static([1, 2, 2, 4, 2]), [1] * 5, "SAME"), images),
            *tf.gradients(tf.gradients(
                tf.nn.max_pool2d(images, 2, 2, "VALID") ** 3, images)[0], images),
        ], 0, 1,
    ),
    "normalized by fixed statistics": (
        lambda images: [
            v1.nn.fused_batch_norm(
                images, tf.ones([4]), tf.zeros([4]), tf.zeros([4]), tf.ones([4]),
                is_training=False)[0],
            raw.FusedBatchNorm(x=images, scale=[1.0] * 4, offset=[0.0] * 4,
                               mean=[0.0] * 4, variance=[1.0] * 4,
                               is_training=False).y,
            raw.FusedBatchNormV2(x=images, scale=[1.0] * 4, offset=[0.0] * 4,
                                 mean=[0.0] * 4, variance=[1.0] * 4,
                                 is_training=False).y,
        ], 0, 1,
    ),
    "Keras's layer normalization": (
        lambda x: tf.keras.layers.LayerNormalization()(x), 0, 1
    ),
    "products of matrices": (
        lambda x, y: [
            tf.matmul(x, _static([6, 3])), tf.matmul(x, x, transpose_b=True),
            tf.matmul(tf.reshape(x, [-1, 24]), _static([24, 2])),
            raw.BatchMatMul(x=x, y=x, adj_y=True),
            raw.BatchMatMulV3(x=x, y=x, Tout=tf.float32, adj_x=True),
        ], 0, 1,
    ),
    "products, examples last": (
        lambda x: tf.matmul(_static([2, 4]), tf.transpose(x[:, :, 0])), 1, 1
    ),
    "einsum": (
        lambda x: [
            tf.einsum("btw,wk->bkt", x, _static([6, 2])), tf.einsum("btw,bsw->bts", x, x),
            tf.einsum("...w,wk->...k", x, _static([6, 2])),
            tf.einsum("b...w,wk->b...k", x, _static([6, 2])),
            tf.einsum("b...w,b...w->b...", x, x),
        ], 0, 1,
    ),
    "einsum to time": (lambda x: [
        tf.einsum("btw->tbw", x), tf.einsum("b...,c->c...b", x[:, 0, 0], _static([3])),
        tf.einsum("b...w->...bw", x)], 1, 1),
    "words as rows": (lambda x: tf.reshape(x, [-1, 6]), 0, 4),
    "words as rows and back": (
        lambda x: tf.reshape(tf.reshape(x, [-1, 6]), [tf.shape(x)[0], 4, 6]), 0, 1
    ),
    "heads": (
        lambda x: tf.transpose(tf.reshape(x, [tf.shape(x)[0], 4, 2, 3]), [0, 2, 1, 3]),
        0, 1,
    ),
    "axes": (
        lambda x, y: [x[:, None], tf.squeeze(y[:, None], 1), tf.expand_dims(y, -1)], 0, 1
    ),
    "axes before": (lambda y: [y[None], tf.expand_dims(y, 0)], 1, 1),
    "joined": (
        lambda x: [
            tf.concat([x, x], 2), tf.stack([x, x], 1), *tf.unstack(x, axis=1),
            *tf.split(x, 2, 1), *tf.split(x, [1, 3], 1), *tf.split(x, 1),
            tf.pad(x, [[0, 0], [1, 0], [0, 0]]),
            tf.pad(x, [[0, 0], [1, 0], [0, 0]], constant_values=1.0),
            tf.pad(x, [[0, 0], [1, 0], [0, 0]], "SYMMETRIC"),
        ], 0, 1,
    ),
    "sliced": (
        lambda x: [
            x[:, 1], x[:, ::2, -1:], x[..., 0], x[: tf.shape(x)[0], 1:],
            tf.slice(x, [0, 1, 0], [-1, 2, 3]),
            tf.slice(x, [0, 0, 1], tf.stack([tf.shape(x)[0], 4, 2])),
        ], 0, 1,
    ),
    "one-hot": (lambda ids: tf.one_hot(ids, 5), 0, 1),
    "one-hot before": (lambda length: tf.one_hot(length, 5, axis=0), 1, 1),
    "made": (
        lambda x: [
            tf.ones([tf.shape(x)[0], 3]), tf.zeros_like(x), tf.ones_like(x),
            tf.tile(_static([1, 3]), [tf.shape(x)[0], 1]), tf.tile(x, [1, 2, 1]),
            tf.broadcast_to(_static([3]), [tf.shape(x)[0], 3]),
            tf.broadcast_to(x[:, :, :1], tf.shape(x)),
        ], 0, 1,
    ),
    "repeated": (lambda y: tf.repeat(y, 3), 0, 3),
    "looked up": (
        lambda ids: [
            tf.gather(_static([5, 3]), ids), tf.nn.embedding_lookup(_weights(), ids),
            raw.Gather(params=_static([5, 3]), indices=ids),
            tf.gather_nd(_static([5, 3]), ids[..., None]),
            raw.ResourceGatherNd(resource=_weights().handle, indices=ids[..., None],
                                 dtype=tf.float32),
        ], 0, 1,
    ),
    "columns": (lambda x: [tf.gather(x, [0, 2], axis=1), tf.gather(x, 1, axis=2)], 0, 1),
    "chosen words": (lambda x, ids: tf.gather(x, ids, batch_dims=1), 0, 1),
    "own words by place": (
        lambda x, ids: tf.gather(
            tf.reshape(x, [-1, 6]),
            tf.reshape(ids + tf.range(tf.shape(ids)[0])[:, None] * 4, [-1])), 0, 4,
    ),
    "own words by pair": (
        lambda x, length: tf.gather_nd(
            x, tf.stack([tf.range(tf.shape(x)[0]), length - 1], 1)), 0, 1,
    ),
    "own words by tiled pairs": (
        lambda x, ids: tf.gather_nd(
            x, tf.stack([tf.tile(_places(x), [1, 4]), ids % 4], 2)), 0, 1,
    ),
    "found": (
        lambda texts: [_table().lookup(texts),
                       tf.strings.to_hash_bucket_fast(texts, 7)], 0, 1,
    ),
    "cross entropies": (
        lambda x, ids: [
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels=ids, logits=x),
            tf.nn.softmax_cross_entropy_with_logits(labels=tf.nn.softmax(x), logits=x),
            raw.SoftmaxCrossEntropyWithLogits(features=x[:, 0], labels=x[:, 1]).loss,
        ], 0, 1,
    ),
    "chosen": (
        lambda x, y: [
            tf.where(x > 0, x, -x), tf.where(y > 0, y, 1.0),
            raw.Select(condition=y > 0, x=x, y=-x),
            raw.Select(condition=x > 0, x=x, y=-x),
        ], 0, 1,
    ),
    "reversed words": (
        lambda x, length: tf.reverse_sequence(x, length, 1, batch_axis=0), 0, 1
    ),
    "passed on": (
        lambda x: [
            tf.identity(x), tf.stop_gradient(x), v1.placeholder_with_default(x, [None, 4, 6]),
            tf.ensure_shape(x, [None, None, 6]), *tf.identity_n([x, x]),
            raw.DebugIdentityV2(input=x), v1.Print(x, []),
        ], 0, 1,
    ),
    "each example by itself": (
        lambda x, length: [
            tf.map_fn(lambda z: tf.cumsum(z) / tf.reduce_sum(z), x),
            tf.map_fn(tf.function(tf.nn.softmax), x),
            tf.map_fn(lambda pair: tf.reduce_sum(pair[0][:pair[1]], 0), (x, length),
                      tf.float32),
            tf.map_fn(lambda z: tf.cond(
                tf.reduce_sum(z) > 0, lambda: z, lambda: tf.map_fn(tf.cumsum, z)), x),
            _rows_by_number(x, lambda j: j + 1),
            *(tf.vectorized_map(f, x) for f in (
                tf.nn.softmax, tf.reduce_sum, lambda z: tf.matmul(z, z, transpose_b=True))),
        ], 0, 1,
    ),
    "declared": (lambda x: per_example(tf.numpy_function(np.abs, [x], tf.float32)), 0, 1),
    "a function": (lambda x: tf.function(lambda z: tf.nn.relu(z) + 1)(x), 0, 1),
    "a function that checks each example": (
        lambda x: _checked(
            x, lambda x: tf.reduce_all(x > -99), lambda x: tf.shape(x)[1] > 3,
            lambda x: tf.reduce_all(tf.equal(tf.shape(x), tf.shape(2 * x))),
            lambda x: tf.reduce_all(_checked(x, lambda x: tf.reduce_all(x > -99)) > -99),
        ), 0, 1),
    "a function that bounds all examples": (
        lambda x: _checked(
            x, lambda x: tf.reduce_max(x) < 99, lambda x: tf.reduce_min(x) >= -99,
            lambda x: 99.0 >= tf.reduce_max(x[:, 0]), lambda x: -99 < tf.reduce_min(x),
            lambda x: tf.reduce_all(tf.reduce_max(x, 0) < 99),
            lambda x: tf.reduce_max(tf.boolean_mask(x, x[:, 0, 0] > 0)) < 99,
            lambda x: 0 < tf.shape(x)[0],
        ), 0, 1),
    "a branch that checks each example": (lambda x: _checked_if(
        x, lambda x: _is_training(), lambda x: tf.reduce_all(x > -99)), 0, 1),
    "a recurrent layer": (lambda x: tf.keras.layers.GRU(3)(x), 0, 1),
    "a list": (
        lambda x: tf.TensorArray(tf.float32, 4).unstack(tf.transpose(x, [1, 0, 2])).stack(),
        1, 1,
    ),
    "a list that grows": (lambda x: raw.TensorListPopBack(
        input_handle=raw.TensorListPushBack(
            input_handle=raw.EmptyTensorList(element_shape=[-1], max_num_elements=2,
                                             element_dtype=tf.float32),
            tensor=x[:, 0, 0]),
        element_shape=[-1], element_dtype=tf.float32).tensor, 0, 1),
    "added": (lambda x: raw.Add(x=x, y=x), 0, 1),
    "gathered from a list": (
        lambda x: raw.TensorListGather(
            input_handle=raw.TensorListFromTensor(
                tensor=tf.transpose(x, [1, 0, 2]), element_shape=[-1, 6]),
            indices=[0, 2], element_shape=[-1, 6], element_dtype=tf.float32), 1, 1,
    ),
}  # fmt: skip


def _places(x):
    return tf.range(tf.shape(x)[0])[:, None]


def _weights():
    with v1.variable_scope("weights", reuse=v1.AUTO_REUSE):
        return v1.get_variable("table", [5, 3], use_resource=True)


_WITH_CONTROL_FLOW = {
    "a branch": (lambda x: tf.cond(_is_training(), lambda: x * 2, lambda: -x), 0, 1),
    "a loop": (lambda x: _loop(x, tf.tanh), 0, 1),
    "a loop over time": (_cell, 0, 1),
    "sizes that are the largest of one": (
        lambda x: tf.reshape(x, [tf.reduce_max([tf.shape(x)[0]]), -1]),
        0,
        1,
    ),
    "a scan": (lambda x: tf.scan(lambda a, b: a + b, tf.transpose(x, [1, 0, 2])), 1, 1),
    "entries beside rows": (
        lambda x, ids: [
            _beside_entries(x, ids, caller)[0]
            for caller in ("function", "branch", "loop")
        ],
        0,
        1,
    ),
}


# Operations that combine examples, or may.
def _above_places(y):
    """Numbers that are 0 or 1 above twice the example's, or not."""
    return 2 * tf.range(tf.shape(y)[0]) + tf.cast(y, tf.int32)


_MIXED = {
    "reduced": lambda x: [tf.reduce_mean(x), tf.reduce_sum(x, 0), tf.reduce_any(x > 0, 0)],
    "against others": lambda y: [y[:, None] - y[None], tf.matmul(y[:, None], y[None])],
    "drawn for classes": lambda x: v1.multinomial(tf.transpose(x[:, 0]), 2),
    "fixed along examples": lambda y: y + _static([8]),
    "summed over examples": lambda x: tf.matmul(x[:, 0], x[:, 1], transpose_a=True),
    "einsum": lambda x: [tf.einsum("btw,bsv->tsvw", x, x), tf.einsum("btw,ctw->bc", x, x),
                         tf.einsum("b...w,c...w->bc...", x, x), tf.einsum("b...->...", x),
                         tf.einsum("b...w,...w->b...w", x, x)],
    "along examples": lambda x, y: [
        tf.cumsum(x), tf.argmax(x), tf.nn.softmax(tf.transpose(x)), tf.nn.top_k(y, 2)[0],
        tf.reverse(x, [0]), tf.roll(x, 1, 0), tf.sort(y), tf.random.shuffle(y),
        tf.signal.rfft(tf.transpose(x)), tf.signal.rfft2d(x[:, 0]),
        raw.ReverseSequence(input=x, seq_lengths=[1, 2, 1, 2], seq_dim=0, batch_dim=1),
    ],
    "reordered": lambda x: [
        tf.reshape(x, [4, -1]), tf.reshape(tf.transpose(x, [1, 0, 2]), [-1, 4]),
        tf.reshape(x, [8, 24]),
    ],
    "squeezed": lambda x: raw.Squeeze(input=x[:, :1]),
    "places that may be another's": lambda y: [
        tf.repeat(_above_places(y), tf.cast(tf.abs(y), tf.int32)),
        raw.SparseToDense(sparse_indices=_above_places(y), output_shape=2 * tf.shape(y),
                          sparse_values=y, default_value=0.0),
    ],
    "chosen": lambda x, y: [x[1:], x[0], x[::2],
                            tf.gather(x, [0]), tf.unstack(x[:8], 8)[0], x[:tf.shape(x)[1]]],
    "joined": lambda x: tf.pad(x, [[1, 0], [0, 0], [0, 0]]),
    "joined blocks": lambda x: [
        tf.reduce_sum(z, 0) for z in (tf.concat([x, x], 0), tf.tile(x, [2, 1, 1]))
    ],
    "blocks of others": lambda x, y: [
        tf.split(tf.concat([x, x], 0), 4)[0], tf.split(tf.concat([x] * 6, 0), 4)[0],
        tf.concat([y, y], 0) * tf.concat([y] * 3, 0),
        tf.concat([y, y], 0)[1:], tf.reshape(tf.concat([y, y], 0), [-1, 2]),
        *tf.split(tf.concat([y, y, y], 0), [tf.shape(y)[0], -1]),
    ],
    "sizes": lambda y: [y * tf.cast(tf.shape(y)[0], tf.float32),
                        tf.broadcast_to(tf.unique(_static([9]))[0], tf.shape(y)),
                        tf.one_hot(tf.cast(y, tf.int32), tf.shape(y)[0])],
    "places": lambda y: [tf.cast(tf.range(tf.shape(y)[0]), tf.float32),
                         tf.gather(_static([9]), tf.range(tf.shape(y)[0]))],
    "places again and again": lambda x: [
        tf.gather_nd(x, places) for twice in [tf.tile(_places(x), [1, 2])]
        for places in (twice, tf.broadcast_to(_places(x), [tf.shape(x)[0], 2]),
                       tf.concat([twice, tf.zeros_like(twice)[:, :1]], 1),
                       tf.tile(tf.concat([_places(x), 0 * _places(x)], 1), [1, 2])[:, :3])
    ],
    "places among places": lambda x: [
        tf.gather_nd(places, places) for places in (
            _places(x), tf.concat([_places(x), 0 * _places(x)], 1))
    ],
    "strides": lambda x: x[:, ::tf.shape(x)[0]],
    "matrices of all examples": lambda images: tf.linalg.triangular_solve(
        images[:, None, :, :4], images[:, :, :4]),
    "batch normalization": lambda images: v1.nn.fused_batch_norm(
        images, tf.ones([4]), tf.zeros([4]))[0],
    "own seed for all": lambda y: tf.random.stateless_uniform(tf.shape(y), [1, 2]),
    "own seeds that a loop counts": lambda y: tf.while_loop(
        lambda i, _: i < 3,
        lambda i, z: (i + 1, z + tf.random.stateless_uniform(tf.shape(z), [i, 2])),
        (0, y))[1],
    "own seed as an argument": lambda y: tf.function(
        lambda y, seed: y + tf.random.stateless_uniform(tf.shape(y), seed))(
            y, tf.constant([1, 2])),
    "own seeds by the place in time": lambda x: tf.map_fn(
        lambda pair: pair[0] + tf.random.stateless_uniform(
            tf.shape(pair[0]), [pair[1], 2]),
        (tf.transpose(x, [1, 0, 2]), tf.range(4)), tf.float32),
    "chosen by the batch": lambda x: tf.cond(
        tf.reduce_sum(x) > 0, lambda: x, lambda: -x),
    "functions that check all examples": lambda x: [
        _checked(x, lambda x: tf.reduce_mean(x) > 0),
        _checked(x, lambda x: tf.shape(x)[0] > 3),
        _checked(x, lambda x: 3 < tf.shape(x)[0]),
        _checked(x, lambda x: tf.reduce_all(tf.range(3) < tf.shape(x)[0])),
        _checked(x, lambda x: tf.reduce_all(tf.shape(x)[0] > tf.range(3))),
        _checked(x, lambda x: tf.reduce_max(x) > 0),
        _checked(x, lambda x: 0 >= tf.reduce_min(x)),
        _checked(x, lambda x: tf.reduce_max(x) < tf.reduce_sum(x)),
        _checked(x, lambda x: tf.reduce_max(tf.range(tf.shape(x)[0])) < 5),
        _checked(x, lambda x: tf.reduce_max(x - tf.reduce_mean(x)) < 5),
        _checked(x, lambda x: _loop(x, lambda z: _checked(
            z, lambda z: tf.reduce_mean(z) > 0))[0, 0, 0] > 0),
        *(_checked_if(x, condition, lambda x: tf.reduce_sum(x) < 10, is_else)
          for condition in (lambda x: _is_training(), lambda x: tf.reduce_all(x > -9))
          for is_else in (False, True)),
    ],
    "a loop that combines": lambda x: _loop(x, lambda z: z - tf.reduce_mean(z, 0)),
    "each example after the others": lambda x: [
        tf.scan(lambda a, b: a + b, x), tf.foldl(lambda a, b: a + b, x)],
    "examples that see others": lambda x: [
        tf.map_fn(lambda z: z + x[0], x),
        tf.map_fn(lambda z: z * tf.cast(tf.shape(x)[0], tf.float32), x),
        tf.map_fn(lambda z: z * tf.random.uniform([]), x),
        _rows_by_number(x, lambda j: j * 1),
    ],
    "a loop until the batch is small": lambda x: tf.while_loop(
        lambda z: tf.reduce_max(z) > 1, lambda z: [z / 2], [x]),
    "a Python function": lambda x: tf.numpy_function(np.abs, [x], tf.float32),
    "of unknown length": lambda y: y * v1.placeholder_with_default([1.0] * 8, [None]),
    "a batch that is one image": lambda x: raw.AdjustContrastv2(
        images=x, contrast_factor=2.0),
    "a batch that is one matrix": lambda x: raw.MatrixSolve(
        matrix=x[:, 0], rhs=x[:, 1]),
    "one draw for all": lambda x: _loop(x, lambda z: z * tf.random.uniform([])),
    "a static number": lambda x: _with_shape(x * 2, [8, 4, 6]),
    "unknown": lambda x: tf.unique(tf.reshape(x, [-1]))[0],
}  # fmt: skip


def _even(ids):
    """Returns a sparse tensor of the words of even numbers."""
    places = tf.where(tf.equal(ids % 2, 0))
    shape = tf.shape(ids, tf.int64)
    return tf.SparseTensor(places, tf.cast(tf.gather_nd(ids, places), tf.int64), shape)


def _in_place(x, places, function):
    """Returns a function of the examples at places, and zeros elsewhere."""
    return tf.scatter_nd(
        places, function(tf.gather_nd(x, places)), tf.shape(x, tf.int64)
    )


def _dense_ids(texts, default):
    words = v1.string_split(texts[:, 0])
    ids = words.with_values(tf.strings.to_hash_bucket_fast(words.values, 5))
    return tf.sparse.to_dense(ids, tf.constant(default, tf.int64))


def _words_of_texts(texts):
    words = v1.string_split(tf.strings.join([texts[:, 0], texts[:, 1]], " "))
    numbers = tf.strings.to_hash_bucket_fast(words.values, 5)
    ids = tf.SparseTensor(words.indices, numbers, words.dense_shape)
    return tf.nn.safe_embedding_lookup_sparse(_static([5, 3]), ids)


def _sorted_to_full_experts(x, length):
    one, other = tf.dynamic_partition(tf.range(tf.shape(x)[0]), length % 2, 2)
    numbers = [tf.boolean_mask(one, tf.gather(length, one) > 1), other]
    return tf.dynamic_stitch(numbers, [2 * tf.gather(x, part) for part in numbers])


def _sorted_to_experts(x, length):
    experts, places = length % 2, tf.range(tf.shape(x)[0])
    parts, numbers = (tf.dynamic_partition(t, experts, 2) for t in (x, places))
    results = [tf.nn.softmax(parts[0]), tf.tanh(parts[1])]
    columns = tf.dynamic_partition(tf.transpose(x, [1, 0, 2]), [0, 1, 0, 1], 2)
    whole = tf.dynamic_stitch([[0, 2], [1, 3]], [columns[0] * 2, columns[1]])
    return [
        tf.dynamic_stitch(numbers, results),
        raw.ParallelDynamicStitch(indices=numbers, data=results),
        tf.transpose(whole, [1, 0, 2]),
    ]


def _crossed(texts):
    crossed = tf.feature_column.crossed_column(["a", "b"], 9)
    column = tf.feature_column.embedding_column(crossed, 3)
    features = {"a": texts[:, 0], "b": texts[:, 1]}
    return v1.feature_column.input_layer(features, [column])


def _indicated_cross(texts, y):
    feature = tf.feature_column
    number = feature.bucketized_column(feature.numeric_column("y"), [-0.5, 0.5])
    cross = feature.indicator_column(feature.crossed_column([number, "words"], 9))
    features = {"y": y, "words": tf.sparse.from_dense(texts)}
    return v1.feature_column.input_layer(features, [cross])


def _column(make):
    """Returns a function of columns of words, with weights and without."""

    def columns(texts, ids, y):
        feature = tf.feature_column
        words = feature.categorical_column_with_hash_bucket("words", 9)
        weighted = feature.weighted_categorical_column(words, "weights")
        number = feature.numeric_column("number", [4])
        features = {
            "words": texts,
            "weights": tf.sigmoid(tf.cast(ids[:, :2], tf.float32) + y[:, None]),
            "number": tf.cast(ids, tf.float32),
        }
        parts = [weighted, feature.bucketized_column(number, [0.5, 2.5])]
        return [make(features, part) for part in parts]

    return columns


def _embedded(features, column):
    embedding = tf.feature_column.embedding_column(column, 3)
    return v1.feature_column.input_layer(features, [embedding])


def _indicated(features, column):
    indicator = tf.feature_column.indicator_column(column)
    return v1.feature_column.input_layer(features, [indicator])


def _linear(features, column):
    return v1.feature_column.linear_model(features, [column])


def _lengths(ids):
    words = _even(ids)
    from tensorflow.python.feature_column import utils

    return [utils.sequence_length_from_sparse_tensor(words, n) for n in (1, 2)]


def _parsed(length):
    numbers, floats = range(1, 5), tf.train.FloatList
    features = [
        {"few": tf.train.Feature(float_list=floats(value=range(i))),
         "all": tf.train.Feature(float_list=floats(value=[i, 2.0]))}
        for i in numbers
    ]  # fmt: skip
    texts = [
        tf.train.Example(features=tf.train.Features(feature=f)).SerializeToString()
        for f in features
    ]
    parts = v1.io.parse_example(
        tf.gather(texts, length - 1),
        {
            "few": tf.io.VarLenFeature(tf.float32),
            "all": tf.io.FixedLenFeature([2], tf.float32),
        },
    )
    few = parts["few"]
    words = few.with_values(tf.cast(few.values, tf.int64))
    return [parts["all"], tf.nn.safe_embedding_lookup_sparse(_static([5, 3]), words)]


def _of_even(make):
    return lambda ids: make(_even(ids))


def _of_filled(make):
    return lambda ids: make(
        tf.sparse.fill_empty_rows(_even(ids), tf.constant(1, tf.int64))[0]
    )


def _ragged(ids):
    """Returns a ragged tensor of the words of even numbers, in a list."""
    words = _even(ids)
    numbers = words.indices[:, 0], words.dense_shape[0]
    return [tf.RaggedTensor.from_value_rowids(words.values, *numbers, validate=False)]


def _nested(inner, outer):
    """Returns rows of rows, padded."""
    return raw.RaggedTensorToTensor(
        shape=tf.constant([-1, 3, 2]),
        values=inner.values,
        default_value=0,
        row_partition_tensors=[outer.row_splits, inner.row_splits],
        row_partition_types=["ROW_SPLITS"] * 2,
    )


def _repeated(number, lengths, others):
    """Returns numbers of rows as `tf.repeat`, but for others than its longest row."""
    most = tf.maximum(tf.reduce_max(lengths), 0)
    wide = tf.tile(tf.expand_dims(tf.range(number), 1), tf.stack([1, most]))
    return tf.boolean_mask(wide, tf.sequence_mask(others, most))


def _in_turns(one, other, shape, place):
    """Returns values of two lists, read in another order or behind another list."""
    behind = other.row_splits[1:] + (one, other)[place].row_splits[-1]
    numbers = tf.reshape(tf.range(2 * one.nrows()), shape)
    return raw.RaggedGather(
        params_nested_splits=[tf.concat([one.row_splits, behind], 0)],
        params_dense_values=tf.concat([one.values, other.values], 0),
        indices=tf.reshape(tf.transpose(numbers), [-1]),
        OUTPUT_RAGGED_RANK=1,
    )[1]


def _numbers_between(begins, limits, step=1):
    """Returns the numbers between two in each row."""
    step = tf.constant(step, tf.int64)
    return raw.RaggedRange(starts=begins, limits=limits, deltas=step)[1]


def _lists_of_others(ids, length):
    """Returns results of lists with the row splits, numbers or lengths of others."""
    words, other = _ragged(ids) + _ragged(ids + 1)
    begins, ends = words.row_splits[:-1], words.row_splits[1:]
    texts = tf.as_string(words)
    read = [
        _numbers_between(begins, other.row_splits[1:]),
        _numbers_between(begins, tf.minimum(begins + 1, other.row_splits[1:])),
        _numbers_between(tf.minimum(begins - 1, ends), ends),
        _numbers_between(ends, begins, -1),  # from the begin of the next row
    ]
    counted = tf.cast(other.values, tf.int32)
    weights = words.with_values(tf.cast(other.values, tf.float32))
    numbers = tf.ragged.range(1, words.row_lengths()).values
    single = tf.reshape(tf.as_string(ids), [-1, 1])
    return [
        *(tf.gather(words.values, places) for places in read),
        raw.RaggedBincount(
            splits=words.row_splits, values=counted, size=4, weights=tf.zeros([0])
        ),
        tf.math.bincount(words, weights=weights, minlength=4, maxlength=4, axis=-1),
        _nested(tf.strings.unicode_decode(tf.as_string(other.values), "UTF-8"), words),
        _repeated(words.nrows(), words.row_lengths(), other.row_lengths()),
        _repeated(words.nrows(), other.row_lengths(), words.row_lengths()),
        tf.repeat(tf.reshape(ids, [-1]), length),
        _in_turns(words, other, [-1, 2], 0),
        _in_turns(words, other, [2, -1], 1),
        words.row_splits[1:] - other.row_splits[:-1],
        tf.ragged.cross([texts, single]).values,
        tf.reduce_sum(words.with_values(words.values * numbers), 1),
    ]


def _splits_of_others(words):
    """Returns ragged rows by numbers that are not their row splits."""
    splits, lengths, number = words.row_splits, words.row_lengths(), words.nrows()
    doubled = tf.RaggedTensor.from_value_rowids(
        words.values, words.value_rowids(), number * 2, validate=False
    )
    padded = [
        tf.RaggedTensor.from_row_splits(words.values, others, validate=False).to_tensor(
            shape=[None, 3]
        )
        for others in (
            *(tf.concat([[1], splits[1:]], 0), splits * 2, splits[::2], splits + 1),
            *(
                tf.concat([[0], tf.cumsum(lengths, **{way: True})], 0)
                for way in ("reverse", "exclusive")
            ),
            doubled.row_splits,
        )
    ]
    pairs = tf.range(tf.size(words.values, tf.int64) + 1) * 2
    letters = tf.RaggedTensor.from_row_splits(
        tf.cast(words.values, tf.int32), pairs, validate=False
    )
    return [
        *padded,
        *(splits[2:], splits[:-2], tf.range(2 * number + 1)[1::2]),
        tf.strings.unicode_decode(tf.as_string(tf.tile(lengths, [2])), "UTF-8").values,
        tf.strings.unicode_encode(letters, "UTF-8"),
        _numbers_between(tf.range(8, dtype=tf.int64), lengths + 8),
    ]


def _of_ragged(make):
    """Returns a function of ids that makes tensors of ragged ones."""

    return lambda ids: make(*_ragged(ids))


# Rows of sparse tensors, and of other lists of entries.
_OF_ENTRIES = {
    "dense": (_of_even(lambda words: [
        tf.sparse.to_dense(words),
        tf.scatter_nd(words.indices, words.values, words.dense_shape),
    ]), 0, 1),
    "lookups": (_of_even(lambda words: [
        tf.nn.safe_embedding_lookup_sparse(_static([4, 3]), words, combiner=way)
        for way in ("sum", "mean", "sqrtn")
    ]), 0, 1),
    "lookups without empty rows": (_of_filled(
        lambda words: tf.nn.embedding_lookup_sparse(_static([4, 3]), words, None)), 0, 1),
    "embedded columns": (_column(_embedded), 0, 1),
    "indicated columns": (_column(_indicated), 0, 1),
    "linear columns": (_column(_linear), 0, 1),
    "lengths of sequences": (_lengths, 0, 1),
    "parsed examples": (_parsed, 0, 1),
    "weighted lookups": (_of_filled(lambda words: tf.nn.embedding_lookup_sparse(
        _static([4, 3]), words, words.with_values(
            tf.sqrt(tf.cast(words.values, tf.float32))))), 0, 1),
    "several rows of each example": (_of_even(
        lambda words: tf.nn.safe_embedding_lookup_sparse(
            _static([4, 3]),
            tf.sparse.reshape(words, [words.dense_shape[0], 2, 2]))[:, 0]), 0, 1),
    "segments": (_of_filled(lambda words: [
        f(tf.cast(words.values, tf.float32), words.indices[:, 0])
        for f in (tf.math.segment_sum, tf.math.segment_max, tf.math.segment_mean)
    ]), 0, 1),
    "segments with a number": (_of_even(lambda words: tf.math.unsorted_segment_sum(
        words.values, words.indices[:, 0], words.dense_shape[0])), 0, 1),
    "products": (_of_even(lambda words: tf.sparse.sparse_dense_matmul(
        words.with_values(tf.cast(words.values, tf.float32)), _static([4, 2]))), 0, 1),
    "sums": (_of_even(lambda words: raw.SparseReduceSum(
        input_indices=words.indices, input_values=words.values,
        input_shape=words.dense_shape, reduction_axes=[1])), 0, 1),
    "sorted to experts": (_sorted_to_experts, 0, 1),
    "tables of parts": (lambda ids: [
        f(tables, ids) for tables in [[_static([3, 3]), _static([2, 3]) * 2]]
        for f in (
            *(lambda tables, ids, way=way: v1.nn.embedding_lookup(tables, ids, way)
              for way in ("mod", "div")),
            lambda tables, ids: v1.nn.embedding_lookup(tables, ids[:, 0]),
            *(lambda tables, ids, way=way: v1.nn.safe_embedding_lookup_sparse(
                tables, _even(ids), partition_strategy=way) for way in ("mod", "div")),
        )], 0, 1),
    "made of others": (_of_even(lambda words: [
        tf.sparse.to_dense(other) for numbers in [words.with_values(
            tf.cast(words.values, tf.float32))] for other in (
                tf.sparse.reorder(words), tf.sparse.concat(1, [words, words]),
                tf.sparse.add(words, words), tf.sparse.maximum(words, words),
                tf.sparse.minimum(words, words), *tf.sparse.split(words, 2, 1),
                tf.sparse.slice(words, [0, 1], [words.dense_shape[0], 2]),
                tf.sparse.softmax(numbers), numbers * [[1.0, 2.0, 3.0, 4.0]],
                numbers / [2.0])
    ]), 0, 1),
    "counts": (_of_even(lambda words: [
        tf.math.bincount(tf.cast(words, tf.int32), minlength=4, maxlength=4, axis=-1),
        tf.sparse.to_indicator(words, 4),
        tf.sparse.add(words, tf.ones_like(tf.sparse.to_dense(words))),
    ]), 0, 1),
    "paths": (lambda x, length: [
        tf.nn.ctc_greedy_decoder(tf.transpose(x, [1, 0, 2]), length)[1],
        tf.nn.ctc_beam_search_decoder(tf.transpose(x, [1, 0, 2]), length, 3)[1],
        v1.nn.ctc_loss(
                    tf.cast(_even(length[:, None] % 2 * 2 + 2), tf.int32), x,
                    tf.ones_like(length) * 4, time_major=False),
    ], 0, 1),
    "padded": (lambda texts: tf.strings.split(texts[:, 0]).to_tensor(shape=[None, 3]), 0, 1),
    "ragged": (_of_ragged(lambda words: [
        *(f(words, 1) for f in (tf.reduce_sum, tf.reduce_mean, tf.reduce_max)),
        tf.reduce_sum(tf.nn.embedding_lookup(_static([4, 3]), words), 1),
        words.row_lengths(), words.to_tensor(shape=[None, 3]),
        tf.sparse.reduce_sum(words.to_sparse(), 1),
        *(part.to_tensor(shape=[None, 2]) for part in (words[:, :2], words[:, -2:])),
        tf.RaggedTensor.from_row_lengths(
            words.values, words.row_lengths(), validate=False).to_tensor(
                shape=[words.nrows(), 3]),
        tf.math.bincount(words, minlength=4, maxlength=4, axis=-1),
    ]), 0, 1),
    "joined ragged rows": (_of_ragged(lambda words: [
        tf.concat([words, words * 2, -words[:, :1]], 1).to_tensor(shape=[None, 7]),
        tf.reduce_sum(tf.concat([words[:, 1:], words], 1), 1),
        tf.stack([words, -words], 1).to_tensor(shape=[None, 2, 3]),
        tf.strings.reduce_join(tf.as_string(words), axis=1, separator=" "),
    ]), 0, 1),
    "chosen entries of rows": (lambda ids: [
        chosen.to_tensor(shape=[None, 3]) for chosen in (
            tf.ragged.boolean_mask(ids, ids > 1),
            *(tf.ragged.boolean_mask(words, words > 1) for words in _ragged(ids)))
    ], 0, 1),
    "ragged rows of dense ones": (lambda x, length: [
        tf.reduce_sum(tf.tanh(rows), 1) for rows in (
            tf.RaggedTensor.from_tensor(x[:, :, 0], length - 2),
            tf.RaggedTensor.from_tensor(x, length),
            tf.RaggedTensor.from_tensor(tf.nn.relu(x[:, :, 0]), padding=0.0),
            tf.RaggedTensor.from_tensor(x[:, 0]))
    ], 0, 1),
    "ragged with weights": (_of_ragged(lambda words: tf.math.bincount(
        words, weights=tf.sqrt(tf.cast(words, tf.float32)), minlength=4, maxlength=4,
        axis=-1)), 0, 1),
    "places in ragged rows": (_of_ragged(lambda words: tf.reduce_sum(words.with_values(
        words.values * tf.ragged.range(words.row_lengths()).values
        * tf.repeat(words.row_lengths(), words.row_lengths())), 1)), 0, 1),
    "ragged texts": (_of_ragged(lambda words: [
        lists.to_tensor(shape=[None, 3]) for texts in [tf.as_string(words * 7)]
        for lists in (tf.strings.ngrams(texts, 2), tf.ragged.cross([texts, texts]),
                      tf.ragged.cross_hashed([texts, words], 9))
    ]), 0, 1),
    "letters of texts": (lambda texts: [
        letters.to_tensor(shape=[None, 3]) for letters in (
            tf.strings.unicode_split(texts[:, 0], "UTF-8"),
            *tf.strings.unicode_decode_with_offsets(texts[:, 0], "UTF-8"))
    ] + [tf.strings.unicode_encode(
        tf.strings.unicode_decode(texts[:, 0], "UTF-8"), "UTF-8")], 0, 1),
    "repeated rows": (lambda x, length: tf.math.unsorted_segment_sum(
        tf.tanh(tf.repeat(x, length, axis=0)),
        tf.repeat(tf.range(tf.shape(x)[0]), length), tf.shape(x)[0]), 0, 1),
    "words of texts": (_words_of_texts, 0, 1),
    "crossed column": (_crossed, 0, 1),
    "crossed sparse columns, indicated": (_indicated_cross, 0, 1),
    "chosen examples": (lambda x, y: _in_place(
        x, tf.where(y > 0), tf.nn.softmax), 0, 1),
    "an entry for each example beside others": (lambda ids, y, length: tf.sparse.to_dense(
        tf.sparse.concat(1, [
            tf.SparseTensor(
                tf.cast(tf.stack([tf.range(tf.shape(y)[0]), length], 1), tf.int64), y,
                tf.cast([tf.shape(y)[0], 5], tf.int64)),
            _even(ids).with_values(tf.cast(_even(ids).values, tf.float32)),
        ])), 0, 1),
}  # fmt: skip
# Entries are of their examples, but no row is of one example alone.
_ENTRIES = {
    "chosen examples": lambda x, y: tf.nn.softmax(tf.boolean_mask(x, y > 0)),
    "chosen by two equal masks": lambda x, y: (
        tf.boolean_mask(x, y > 0) * tf.boolean_mask(x, y > 0)
    ),
    "values": _of_even(lambda words: tf.cast(words.values, tf.float32) * 2),
    "places": _of_even(lambda words: words.indices),
    "each once": _of_even(lambda words: tf.unique(words.values)[0]),
    "chosen entries": _of_even(
        lambda words: tf.sparse.retain(words, words.values > 1).values
    ),
}
_MIXED |= {
    "rows by number in a loop": lambda x, length: _loop(x, lambda z: z + tf.gather(
        tf.reshape(z, [-1, 6]), length % 4 + tf.range(tf.shape(z)[0]) * 4)[:, None]),
    "sum of chosen examples": lambda x, y: tf.reduce_sum(
        tf.boolean_mask(x, y > 0), 0),
    "number of chosen examples": lambda x, y: tf.cast(
        tf.size(tf.where(y > 0)), tf.float32) * y,
    "lists of other examples": lambda x, length, ids: [
        tf.dynamic_stitch(numbers, parts)
        for parts, numbers in [
            (tf.dynamic_partition(x, length % 2, 2),
             tf.dynamic_partition(tf.range(tf.shape(x)[0]), ids[:, 0] % 2, 2)),
            (tf.dynamic_partition(x, length % 2, 2)[:1],
             tf.dynamic_partition(tf.range(tf.shape(x)[0]), length % 2, 2)[:1]),
            (tf.dynamic_partition(x, length % 2, 2)[::-1],
             tf.dynamic_partition(tf.range(tf.shape(x)[0]), length % 2, 2)),
        ]
    ],
    "lists of parts of a list": lambda x, length: [
        tf.dynamic_stitch([tf.gather(some, part) for part in parts],
                          [tf.gather(tf.gather(x, some), part) for part in parts])
        for some in tf.dynamic_partition(tf.range(tf.shape(x)[0]), length % 2, 2)[:1]
        for parts in [tf.dynamic_partition(
            tf.range(tf.size(some)), tf.gather(length, some) % 3, 2)]
    ],
    "the last entry of each value": _of_even(lambda words: [
        tf.gather(tf.dynamic_stitch([tf.gather(values, part) for part in parts],
                                    tf.dynamic_partition(words.values, odd, 2)), values)
        for odd in [tf.cast(words.values % 2, tf.int32)]
        for values in [tf.unique(words.values)[1]]
        for parts in [tf.dynamic_partition(tf.range(tf.size(values)), odd, 2)]
    ]),
    "texts as wide as the longest": lambda texts: tf.strings.split(
        texts[:, 0]).to_tensor(),
    "ragged rows of others": _of_ragged(lambda words: [
        tf.reduce_sum(words.with_values(values), 1) for values in (
            words.values[::-1], tf.cumsum(words.values),
            tf.gather(words.values, words.row_splits[:-1]))
    ] + [tf.cast(words.row_splits[1:], tf.float32), tf.reduce_sum(words[1:], 1)]),
    "ragged rows as wide as the longest": _of_ragged(lambda words: [
        words.to_tensor(), tf.RaggedTensor.from_row_splits(
            words.values, words.row_splits, validate=False).to_tensor(),
        *(raw.RaggedTensorToTensor(
            shape=tf.stack([-1, width]), values=words.values,
            default_value=tf.constant(0, tf.int64),
            row_partition_tensors=[words.row_splits], row_partition_types=["ROW_SPLITS"])
            for width in (tf.size(words.values), v1.get_variable("width", [], tf.int32)))]),
    "lists of other ragged rows": lambda ids, length: _lists_of_others(ids, length),
    "row splits of other rows": _of_ragged(lambda words: _splits_of_others(words)),
    "as many as the longest row has": lambda texts, ids: [
        tf.fill(sparse.dense_shape[1:], 1.0) for sparse in (
            v1.string_split(texts[:, 0]), _ragged(ids)[0].to_sparse(),
            tf.sparse.concat(1, [v1.string_split(texts[:, 0])] * 2))],
    "padded words": _of_ragged(lambda words: tf.strings.ngrams(
        tf.as_string(words), 2, pad_values="_").to_tensor(shape=[None, 3])),
    "as wide as the longest": lambda texts: [
        tf.sparse.to_dense(v1.string_split(texts[:, 0]), default_value=""),
        *(way(tf.one_hot(_dense_ids(texts, default), 5, off_value=off), axis)
          for way, default, off, axis in (
              (tf.reduce_sum, 0, 0.0, 1), (tf.reduce_sum, -1, 1.0, 1),
              (tf.reduce_sum, -1, 0.0, 2), (tf.reduce_mean, -1, 0.0, 1))),
        tf.one_hot(_dense_ids(texts, -1), 5),
        *(tf.reduce_sum(tf.one_hot(ids, 5), 1) + tf.cast(tf.shape(ids)[1], tf.float32)
          for ids in [_dense_ids(texts, -1)]),
    ],
    "padded with other rows": _of_even(lambda words: tf.concat([
        tf.math.segment_sum(words.values, words.indices[:, 0]) + 1,
        tf.zeros(words.dense_shape[:1] - tf.shape(tf.math.segment_sum(
            words.values, words.indices[:, 0]), tf.int64), tf.int64)], 0)),
    "pairs of chosen examples": lambda x, y: tf.gather_nd(x, tf.where(
        x[:, :, 0] > 0)) * tf.gather_nd(x, tf.where(x[:, :, 1] > 0)),
    "numbers of every second entry": _of_even(lambda words: tf.math.unsorted_segment_sum(
        tf.gather(_static([8]), words.indices[::2, 1]), words.indices[::2, 0],
        words.dense_shape[0])),
    "entries in reverse": _of_even(lambda words: tf.math.unsorted_segment_sum(
        words.values, words.indices[::-1, 0], words.dense_shape[0])),
    "experts without room": _sorted_to_full_experts,
    "rows of neighbours": lambda x, ids: tf.gather(
        x, tf.range(tf.shape(x)[0]) + ids[:, 0]),
    "two sizes of one name": lambda x: _reshaped_by_two_numbers(x),
    "two lists": lambda ids, y: tf.boolean_mask(y, y > 0) + tf.boolean_mask(y, y < 0),
    "lists by two fed numbers": lambda y: tf.boolean_mask(y, y > _fed()) * (
        tf.boolean_mask(y, y > _fed())),
    "entries inside": lambda x, ids: [
        _beside_entries(x, ids, caller)[1] for caller in ("function", "branch", "loop")],
    "entries with a gradient of their own": _of_even(lambda words: tf.custom_gradient(
        lambda entries: (tf.tanh(entries), tf.tanh))(tf.cast(words.values, tf.float32))),
    "entries beside examples": lambda y: y * tf.boolean_mask(y, y > 0),
    "numbers of examples": lambda y: tf.cast(tf.where(y > 0), tf.float32) * 2,
    "another number of examples": _of_even(lambda words: tf.sparse.to_dense(
        tf.SparseTensor(words.indices, words.values, [8, 4]))),
}  # fmt: skip


def _reshaped_by_two_numbers(x):
    """A function and its caller read two numbers, of which the tensors have one name."""
    two, three = (v1.get_variable(f"v{n}", [], tf.int32) for n in (2, 3))

    @tf.function
    def inner(x):
        return tf.reshape(x, tf.stack([three.read_value(), tf.shape(x)[1], -1]))

    @tf.function
    def outer(x):
        shape = tf.stack([tf.shape(x)[0], two.read_value(), 12])
        return inner(tf.transpose(tf.reshape(x, shape), [1, 0, 2]))

    return outer(x)


def _fed():
    return v1.placeholder_with_default(0.0, [])


def _is_training():
    return v1.placeholder_with_default(True, [])


@pytest.fixture(scope="module")
def seen() -> set[str]:
    return set()


@pytest.mark.parametrize("name", _ROWS)
def test_rows_are_rows(name, seen):
    seen |= _assert_rows(*_ROWS[name])


@pytest.mark.parametrize("name", _OF_ENTRIES)
def test_rows_of_entries_are_rows(name, seen):
    seen |= _assert_rows(*_OF_ENTRIES[name])


@pytest.mark.parametrize("name", _ENTRIES)
def test_entries_of_examples_are_entries(name):
    states, _, _ = _states(_ENTRIES[name], is_run=False)
    assert {state.kind for state in states} == {"entries"}


def test_values_that_are_listed_once_are_not_in_the_order_of_examples():
    with tf.Graph().as_default():
        ids = v1.placeholder(tf.int32, [None, 5], "ids")
        values = _even(ids).values
        once = tf.unique(values)[0]
        some = tf.boolean_mask(once, once > 1)
        views = tf.concat([ids, ids], 0)
        repeated = [tf.repeat(words, words) for words in (values, once)]
        analysis = Analysis([ids])
        analysis.analyze([values, once, some, views, *repeated])
        assert {analysis.state(words).kind for words in repeated} == {"entries"}
        assert all(map(analysis.is_in_order, (values, repeated[0])))
        assert not any(map(analysis.is_in_order, (once, some, views, repeated[1])))


def test_a_function_that_is_made_later_is_looked_into():
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [None])
        analysis = Analysis([x])
        analysis.analyze([x * tf.function(lambda: tf.ones([]))()])
        noise = tf.function(lambda: tf.random.uniform([]))()
        assert analysis.analyze_further([noise])
        assert analysis.state(noise) == MIXED


def test_a_size_that_a_rule_asks_for_too_early_is_found_anew():
    """The rule of a sum by numbers looks for zeros that are added behind it."""
    with tf.Graph().as_default():
        ids = v1.placeholder(tf.int32, [None, 5], "ids")
        words, rows = _even(ids), tf.abs(ids)
        sums, size = (
            tf.math.segment_sum(words.values, words.indices[:, 0]),
            tf.shape(rows),
        )
        zeros = tf.zeros(size[:1] - tf.shape(sums), tf.int64)
        analysis = Analysis([ids])
        analysis.analyze([tf.concat([sums, zeros], 0), rows])
        assert [*analysis.value(size)] == [N, Size(5)]


def test_values_of_a_ragged_part_are_in_the_order_of_examples():
    with tf.Graph().as_default():
        values = v1.placeholder(tf.float32, [None])
        splits = [v1.placeholder(tf.int64, [None]) for _ in range(2)]
        flat = tf.RaggedTensor.from_row_splits(values, splits[0], validate=False)
        nested = tf.RaggedTensor.from_nested_row_splits(values, splits, validate=False)
        for ragged in (flat, nested):
            parts = tf.nest.flatten(ragged, expand_composites=True)
            analysis = Analysis((), (), states_of_ragged({"x": parts}))
            doubled = 2 * values
            analysis.analyze([doubled, flat.to_sparse().values])
            assert analysis.is_in_order(doubled)


@pytest.mark.usefixtures("control_flow")
@pytest.mark.parametrize("name", _WITH_CONTROL_FLOW)
def test_rows_of_loops_and_branches_are_rows(name, seen):
    seen |= _assert_rows(*_WITH_CONTROL_FLOW[name])


@pytest.mark.usefixtures("control_flow")
@pytest.mark.parametrize("name", _MIXED)
def test_what_combines_examples_is_mixed(name):
    states, _, _ = _states(_MIXED[name], is_run=False)
    assert {state.kind for state in states} == {"mixed"}


def test_axes_of_a_transpose_may_be_counted_from_the_end():
    """TensorFlow 2.15 cannot run it."""

    def make(x):
        return tf.transpose(tf.transpose(x, [1, 0, 2]), [-2, 0, 2])

    (state,), _, _ = _states(make, is_run=False)
    assert (state.kind, state.axis) == ("rows", 0)


@pytest.mark.parametrize("can_check", [False, True])
def test_facts_are_taken_only_where_micro_batches_check_them(can_check):
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [None, 4])
        places = tf.cast(x[:, 0], tf.int32) + 4 * tf.range(tf.shape(x)[0])
        chosen = tf.gather(tf.reshape(x, [-1]), places)
        analysis = Analysis([x], can_check=can_check)
        analysis.analyze([chosen])
        assert (analysis.state(chosen).kind == "rows") is can_check
        assert len(analysis.guards) == can_check


@pytest.mark.parametrize(
    "make",
    [
        lambda x: tf.reshape(tf.reshape(x, [-1, 6]), tf.shape(x)),
        lambda x, ids: x + tf.cast(ids, tf.float32)[..., None],
        lambda x: tf.transpose(
            tf.reshape(x, [tf.shape(x)[0], tf.shape(x)[1], 2, 3]), [0, 2, 1, 3]
        ),
        lambda x: tf.reshape(x, [-1, 6]),
    ],
)
def test_a_number_of_words_that_is_not_known(make):
    _assert_rows(make, 0, is_dynamic=True)


def test_random_numbers_have_rows_if_a_state_draws_them(seen):
    def draw(y):
        shape, wide = tf.shape(y), tf.stack([tf.shape(y)[0], 3])
        generator = tf.random.Generator.from_seed(1)
        return [
            *(f(shape) for f in (tf.random.normal, tf.random.uniform)),
            tf.random.truncated_normal(wide),
            tf.random.uniform(wide, 0, 9, tf.int32),
            tf.random.categorical(tf.ones([tf.shape(y)[0], 3]), 2),
            *(f(wide, 2.0) for f in (tf.random.gamma, tf.random.poisson)),
            *(f(wide) for f in (generator.normal, generator.uniform)),
            generator.truncated_normal(wide),
            generator.uniform(wide, 0, 9, tf.int32),
        ]

    seen |= _assert_rows(draw, 0, is_random=True)


def test_random_numbers_of_joined_rows_are_of_their_blocks():
    def drop(y):
        return tf.split(tf.nn.dropout(tf.concat([y, -y], 0), 0.5), 2)

    _assert_rows(drop, 0, is_random=True)


def test_values_of_a_table_of_unknown_rank_may_be_vectors():
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, [0.0])
    function = tf.function(table.lookup, autograph=False)
    spec = tf.TensorSpec([None], tf.int64)
    graph = function.get_concrete_function(spec).graph
    (values,) = graph.outputs
    assert values.shape.rank is None  # the values have rank 2
    analysis = Analysis(graph.inputs[:1])
    analysis.analyze([values])
    assert analysis.state(values).kind == "mixed"


@pytest.mark.parametrize("control_flow", ["v1", "v2"], indirect=True)
def test_a_loop_that_gets_results_by_a_gradient_is_analysed_anew(control_flow):
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [None, 3])
        y = _loop(x, tf.sin)
        analysis = Analysis([x])
        analysis.analyze([y])
        assert analysis.analyze_further([y + 1.0])
        assert not analysis.analyze_further(tf.gradients(y, x))


def test_the_seed_of_a_micro_batch_draws_rows_in_a_loop():
    def draw(y):
        seed = v1.placeholder(tf.int32, [2])
        return _loop(y, lambda z: z + tf.random.stateless_uniform(tf.shape(y), seed))

    _assert_rows(draw, 0, is_run=False)


def test_draws_for_each_number_of_a_parameter_have_its_rows(seen):
    def draw(y):
        seed = v1.placeholder(tf.int32, [2])
        whole = tf.concat([[3], tf.shape(y)], 0)
        return [
            *(f([3], y) for f in (tf.random.gamma, tf.random.poisson)),
            tf.random.stateless_gamma(whole, seed, y),
            tf.random.stateless_poisson(whole, seed, y, tf.float32),
            tf.transpose(tf.random.stateless_categorical(y[:, None], 3, seed)),
        ]

    seen |= _assert_rows(draw, 1, is_run=False)


def _of_elements(kind: str):
    """Returns tensors of an operation that works element by element, of some dtype."""
    names = [argument.name for argument in _definition(kind).input_arg]
    for dtype in _DTYPES:
        with tf.Graph().as_default():
            inputs = {name: tf.zeros([2, 3], dtype) for name in names}
            if _call(kind, inputs) is not None:
                break
    else:
        pytest.fail(f"{kind} takes none of {_DTYPES}")

    def make(x, texts):
        first = texts if dtype == tf.string else tf.cast(x > 0, dtype)
        if dtype.is_floating:
            first = tf.abs(x) / 4 + 0.1
        if kind == "StringToNumber":
            first = tf.strings.as_string(x)
        inputs = dict.fromkeys(names, first)
        return list(filter(None.__ne__, [_call(kind, inputs)]))

    return make


def _definition(kind: str):
    from tensorflow.python.framework import op_def_registry

    return op_def_registry.get(kind)


def _call(kind: str, inputs: dict):
    needed = {**NEEDED.get(kind, {})}
    if kind == "Cast":
        needed["DstT"] = tf.float32
    if kind in ("RegexReplace", "RegexFullMatch"):
        inputs = inputs | {"pattern": tf.constant("a")}
        if kind == "RegexReplace":
            inputs |= {"rewrite": tf.constant("b")}
    if kind == "ClipByValue":
        (first, *others) = inputs
        inputs = inputs | dict.fromkeys(others, tf.zeros([], inputs[first].dtype))
    if kind.startswith("FakeQuantWithMinMaxVars"):
        inputs = inputs | {"min": tf.constant(-1.0), "max": tf.constant(1.0)}
    if kind in ("AddN", "StringJoin", "AccumulateNV2"):
        inputs = {"inputs": [next(iter(inputs.values()))] * 2}
        if kind == "AccumulateNV2":
            needed["shape"] = tf.TensorShape([None, 4, 6])
    try:
        return getattr(raw, kind)(**inputs, **needed)
    except (TypeError, ValueError):
        return None


@pytest.mark.parametrize("kind", (*ELEMENTWISE, "Cast"))
def test_what_works_element_by_element_keeps_rows(kind, seen):
    if _definition(kind) is None or not hasattr(raw, kind):
        pytest.skip(f"this TensorFlow has no {kind}")
    seen |= _assert_rows(_of_elements(kind), 0)


@pytest.mark.parametrize("mode", ["lstm", "gru"])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_recurrent_layer_of_cudnn_has_rows_and_changes_nothing(mode, axis, seen):
    """As Keras 3 makes it on a GPU; the shapes alone, which need none."""
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [None, 4, 6])
        state = tf.expand_dims(tf.zeros([tf.shape(x)[0], 3]), 1 - axis)
        rows = tf.transpose(x, [1, 0, 2]) if axis else x
        layer, with_dropout = (
            raw.CudnnRNNV3(
                input=rows,
                input_h=state,
                input_c=state if mode == "lstm" else 0.0,
                params=tf.zeros([200]),
                sequence_lengths=tf.fill([tf.shape(x)[0]], tf.shape(x)[1]),
                rnn_mode=mode,
                time_major=bool(axis),
                dropout=dropout,
            )
            for dropout in (0.0, 0.5)
        )
        analysis, sums = Analysis([x]), layer.output + rows[..., :1]
        analysis.analyze([sums, with_dropout.output])
        for tensor in (sums, layer.output_h):
            assert analysis.state(tensor)[:2] == ("rows", axis)
        assert analysis.state(with_dropout.output).kind == "mixed"
        assert is_repeatable(layer.output.op, {})
        assert not is_repeatable(with_dropout.output.op, {})
        assert not changes_something(with_dropout.output.op, {})
    seen.add("CudnnRNNV3")


def test_every_rule_was_tried(seen):
    if len(seen) < 100:
        pytest.skip("the tests before did not run in this process")
    alike = {"Enter", "NextIteration", "RefEnter", "RefIdentity", "LookupTableFind"}
    untried = RULES.keys() - seen - alike
    kinds = {kind for kind in untried if _definition(kind) and hasattr(raw, kind)}
    assert {kind for kind in kinds if not kind.startswith("TensorArray")} <= {
        *(
            "StatelessTruncatedNormal",
            "StatelessRandomNormal",
            "StatelessRandomUniform",
        ),
        *("StatelessRandomUniformInt", "MatrixDiagPartV3", "TensorListElementShape"),
        *("TensorListLength", "StatelessRandomGammaV2"),
        "StatelessRandomGammaV3",
    }


@pytest.mark.once
@pytest.mark.parametrize("rank, kind", [(None, "mixed"), (2, "sizes")])
def test_the_shape_of_a_sparse_tensor_has_the_number_of_examples(rank, kind):
    with tf.Graph().as_default():
        sparse = v1.sparse_placeholder(
            tf.int64, None if rank is None else [None] * rank
        )
        parts = [sparse.indices, sparse.values, sparse.dense_shape]
        states, values = states_of_sparse({"words": parts})
        number = sparse.dense_shape[0] * 2
        analysis = Analysis((), (), states, values)
        analysis.analyze([number])
        assert analysis.state(number).kind == kind
