"""A call of every function of some modules of TensorFlow, for batches of examples.

n = number of examples, which is not known.
"""

import functools
import inspect
from collections.abc import Callable

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1
MODULES = ("math", "nn", "image", "signal", "strings", "sparse", "ragged")
_SHAPES = {
    "x": ([None, 4], tf.float32),
    "y": ([None], tf.float32),
    "words": ([None, 4, 6], tf.float32),
    "signal": ([None, 64], tf.float32),
    "images": ([None, 8, 8, 3], tf.float32),
    "maps": ([None, 8, 8, 4], tf.float32),
    "volumes": ([None, 4, 4, 4, 2], tf.float32),
    "boxes": ([None, 5, 4], tf.float32),
    "ids": ([None, 4], tf.int32),
    "labels": ([None], tf.int32),
    "flags": ([None, 4], tf.bool),
    "waves": ([None, 4, 6], tf.complex64),
    "cubes": ([None, 2, 4, 6], tf.complex64),
    "texts": ([None], tf.string),
    "characters": ([None, 4], tf.string),
}


class Batch:
    """Placeholders of a batch, in the graph of the moment.

    Attributes:
        parts: The placeholders, by name.
    """

    def __init__(self):
        self.parts = {
            name: v1.placeholder(dtype, shape, name)
            for name, (shape, dtype) in _SHAPES.items()
        }

    def __getattr__(self, name: str) -> tf.Tensor:
        return self.parts[name]

    @functools.cached_property
    def sparse(self) -> tf.SparseTensor:
        """A sparse matrix of numbers."""
        return tf.sparse.from_dense(self.x)

    @functools.cached_property
    def sparse_ids(self) -> tf.SparseTensor:
        """A sparse matrix of integers."""
        return tf.sparse.from_dense(tf.cast(self.ids, tf.int64))

    @functools.cached_property
    def sparse_texts(self) -> tf.SparseTensor:
        """A sparse matrix of texts."""
        return tf.sparse.from_dense(self.characters)

    @functools.cached_property
    def ragged(self) -> tf.RaggedTensor:
        """A ragged matrix of texts."""
        return tf.strings.split(self.texts)

    @functools.cached_property
    def ragged_numbers(self) -> tf.RaggedTensor:
        """A ragged matrix of numbers."""
        return tf.strings.to_number(self.ragged)


def _static(*shape: int) -> tf.Tensor:
    return tf.reshape(tf.range(1.0, np.prod(shape) + 1) % 3 + 1, shape)


def _ones(number: int) -> list[int]:
    return [1] * number


# Arguments that the functions which are not listed below are tried with.
_TRIED = (
    lambda b: (b.x,),
    lambda b: (b.x, b.x),
    lambda b: (b.x, b.x, b.x),
    lambda b: (b.ids,),
    lambda b: (b.flags, b.flags),
    lambda b: (b.flags,),
    lambda b: (b.waves,),
    lambda b: (b.cubes,),
    lambda b: (b.signal,),
    lambda b: (b.texts,),
    lambda b: (b.images,),
)

_N = lambda b: tf.shape(b.x)[0]
_SEED = (1, 2)
# Functions that no batch can be given to, with the reason.
NO_BATCH = {
    **dict.fromkeys(
        (
            *("image.decode_and_crop_jpeg", "image.decode_bmp", "image.decode_gif"),
            *("image.decode_image", "image.decode_jpeg", "image.decode_png"),
            *("image.decode_webp", "image.decode_jxl", "image.extract_jpeg_shape"),
            *("image.is_jpeg", "image.encode_jpeg", "image.adjust_jpeg_quality"),
            *("image.random_jpeg_quality", "image.stateless_random_jpeg_quality"),
            *("image.non_max_suppression", "image.non_max_suppression_overlaps"),
            *("image.non_max_suppression_with_scores",),
            *("image.sample_distorted_bounding_box",),
            *("image.stateless_sample_distorted_bounding_box",),
        ),
        "takes a single image",
    ),
    "image.generate_bounding_box_proposals": "runs on GPUs alone",
    "sparse.sampled_addmm": "needs a static number of examples",
    **dict.fromkeys(
        (
            *("signal.hamming_window", "signal.hann_window", "signal.kaiser_window"),
            *("signal.kaiser_bessel_derived_window", "signal.vorbis_window"),
            *("signal.inverse_stft_window_fn", "signal.linear_to_mel_weight_matrix"),
            *("math.sobol_sample", "sparse.eye", "ragged.constant", "ragged.range"),
            *("nn.all_candidate_sampler", "nn.fixed_unigram_candidate_sampler"),
            "nn.learned_unigram_candidate_sampler",
        ),
        "takes sizes",
    ),
}


CALLS: dict[str, Callable] = {
    "math.accumulate_n": lambda f, b: f([b.x, b.x]),
    "math.add_n": lambda f, b: f([b.x, b.x]),
    "math.argmax": lambda f, b: f(b.x, 1),
    "math.argmin": lambda f, b: f(b.x, 1),
    "math.approx_max_k": lambda f, b: f(b.x, 2),
    "math.approx_min_k": lambda f, b: f(b.x, 2),
    "math.bincount": lambda f, b: f(b.ids, minlength=5, maxlength=5, axis=-1),
    "math.confusion_matrix": lambda f, b: f(b.labels, b.labels, 5),
    "math.count_nonzero": lambda f, b: f(b.x, 1),
    "math.cumulative_logsumexp": lambda f, b: f(b.x, 1),
    "math.cumprod": lambda f, b: f(b.x, 1),
    "math.cumsum": lambda f, b: f(b.x, 1),
    "math.imag": lambda f, b: f(b.waves),
    "math.angle": lambda f, b: f(b.waves),
    "math.conj": lambda f, b: f(b.waves),
    "math.real": lambda f, b: f(b.waves),
    "math.in_top_k": lambda f, b: f(b.labels, b.x, 2),
    "math.invert_permutation": lambda f, b: f(b.labels),
    "math.polyval": lambda f, b: f([1.0, 2.0], b.x),
    "math.scalar_mul": lambda f, b: f(2.0, b.x),
    "math.top_k": lambda f, b: f(b.x, 2),
    "math.l2_normalize": lambda f, b: f(b.x, 1),
    **{
        f"math.reduce_{name}": lambda f, b: f(b.x, 1)
        for name in (
            *("euclidean_norm", "logsumexp", "max", "mean", "min", "prod", "std"),
            *("sum", "variance"),
        )
    },
    "math.reduce_all": lambda f, b: f(b.flags, 1),
    "math.reduce_any": lambda f, b: f(b.flags, 1),
    **{
        f"math.segment_{name}": lambda f, b: tf.transpose(
            f(tf.transpose(b.x), [0, 0, 1, 1])
        )
        for name in ("max", "mean", "min", "prod", "sum")
    },
    **{
        f"math.unsorted_segment_{name}": lambda f, b: tf.transpose(
            f(tf.transpose(b.x), [0, 1, 0, 1], 2)
        )
        for name in ("max", "mean", "min", "prod", "sqrt_n", "sum")
    },
    # Neural networks.
    "nn.approx_max_k": lambda f, b: f(b.x, 2),
    "nn.approx_min_k": lambda f, b: f(b.x, 2),
    "nn.atrous_conv2d": lambda f, b: f(b.images, _static(2, 2, 3, 2), 2, "SAME"),
    "nn.atrous_conv2d_transpose": lambda f, b: f(
        b.images, _static(2, 2, 2, 3), [_N(b), 8, 8, 2], 2, "SAME"
    ),
    "nn.avg_pool": lambda f, b: f(b.images, 2, 2, "SAME"),
    "nn.avg_pool1d": lambda f, b: f(b.words, 2, 2, "SAME"),
    "nn.avg_pool2d": lambda f, b: f(b.images, 2, 2, "SAME"),
    "nn.avg_pool3d": lambda f, b: f(b.volumes, 2, 2, "SAME"),
    "nn.max_pool": lambda f, b: f(b.images, 2, 2, "SAME"),
    "nn.max_pool1d": lambda f, b: f(b.words, 2, 2, "SAME"),
    "nn.max_pool2d": lambda f, b: f(b.images, 2, 2, "SAME"),
    "nn.max_pool3d": lambda f, b: f(b.volumes, 2, 2, "SAME"),
    "nn.max_pool_with_argmax": lambda f, b: f(b.images, 2, 2, "SAME"),
    "nn.fractional_avg_pool": lambda f, b: f(b.images, [1, 1.4, 1.4, 1], seed=1),
    "nn.fractional_max_pool": lambda f, b: f(b.images, 1.4, seed=1),
    "nn.pool": lambda f, b: f(b.images, [2, 2], "MAX", [2, 2], "SAME"),
    "nn.batch_norm_with_global_normalization": lambda f, b: f(
        b.images, *[_static(3)] * 4, 1e-3, True
    ),
    "nn.batch_normalization": lambda f, b: f(b.images, *[_static(3)] * 4, 1e-3),
    "nn.bias_add": lambda f, b: f(b.x, _static(4)),
    "nn.collapse_repeated": lambda f, b: f(b.ids, b.labels),
    "nn.compute_accidental_hits": lambda f, b: f(
        tf.cast(b.labels[:, None], tf.int64), tf.constant([1, 2], tf.int64), 1
    ),
    "nn.compute_average_loss": lambda f, b: f(b.y),
    "nn.conv1d": lambda f, b: f(b.words, _static(2, 6, 2), 1, "SAME"),
    "nn.conv1d_transpose": lambda f, b: f(
        b.words, _static(2, 2, 6), [_N(b), 4, 2], 1, "SAME"
    ),
    "nn.conv2d": lambda f, b: f(b.images, _static(2, 2, 3, 2), 1, "SAME"),
    "nn.conv2d_transpose": lambda f, b: f(
        b.images, _static(2, 2, 2, 3), [_N(b), 8, 8, 2], 1, "SAME"
    ),
    "nn.conv3d": lambda f, b: f(b.volumes, _static(2, 2, 2, 2, 2), _ones(5), "SAME"),
    "nn.conv3d_transpose": lambda f, b: f(
        b.volumes, _static(2, 2, 2, 2, 2), [_N(b), 4, 4, 4, 2], 1, "SAME"
    ),
    "nn.conv_transpose": lambda f, b: f(
        b.images, _static(2, 2, 2, 3), [_N(b), 8, 8, 2], 1
    ),
    "nn.convolution": lambda f, b: f(
        b.images, _static(2, 2, 3, 2), padding="SAME", dilations=2
    ),
    "nn.ctc_beam_search_decoder": lambda f, b: f(
        tf.transpose(b.words, [1, 0, 2]), b.labels
    ),
    "nn.ctc_greedy_decoder": lambda f, b: f(tf.transpose(b.words, [1, 0, 2]), b.labels),
    "nn.ctc_loss": lambda f, b: f(
        b.ids, b.words, b.labels, b.labels, logits_time_major=False
    ),
    "nn.ctc_unique_labels": lambda f, b: f(b.ids),
    "nn.depth_to_space": lambda f, b: f(b.maps, 2),
    "nn.space_to_depth": lambda f, b: f(b.maps, 2),
    "nn.space_to_batch": lambda f, b: f(b.maps, [2, 2], [[0, 0], [0, 0]]),
    "nn.with_space_to_batch": lambda f, b: f(
        b.images, [2, 2], "SAME", lambda z, *_: z * 2, [2, 2], [1, 2]
    ),
    "nn.depthwise_conv2d": lambda f, b: f(
        b.images, _static(2, 2, 3, 1), _ones(4), "SAME"
    ),
    "nn.depthwise_conv2d_backprop_filter": lambda f, b: f(
        b.images, [2, 2, 3, 1], b.images, _ones(4), "SAME"
    ),
    "nn.depthwise_conv2d_backprop_input": lambda f, b: f(
        [_N(b), 8, 8, 3], _static(2, 2, 3, 1), b.images, _ones(4), "SAME"
    ),
    "nn.dilation2d": lambda f, b: f(
        b.images, _static(2, 2, 3), _ones(4), "SAME", "NHWC", _ones(4)
    ),
    "nn.erosion2d": lambda f, b: f(
        b.images, _static(2, 2, 3), _ones(4), "SAME", "NHWC", _ones(4)
    ),
    "nn.dropout": lambda f, b: f(b.x, 0.5),
    "nn.embedding_lookup": lambda f, b: f(_static(5, 3), b.ids),
    "nn.embedding_lookup_sparse": lambda f, b: f(
        _static(5, 3), b.sparse_ids, None, combiner="mean"
    ),
    "nn.safe_embedding_lookup_sparse": lambda f, b: f(_static(5, 3), b.sparse_ids),
    "nn.in_top_k": lambda f, b: f(b.labels, b.x, 2),
    "nn.isotonic_regression": lambda f, b: f(b.x),
    "nn.l2_normalize": lambda f, b: f(b.x, 1),
    "nn.local_response_normalization": lambda f, b: f(b.images),
    "nn.lrn": lambda f, b: f(b.images),
    "nn.moments": lambda f, b: f(b.words, [1]),
    "nn.normalize_moments": lambda f, b: f(b.y, b.y, b.y, None),
    "nn.nce_loss": lambda f, b: f(
        _static(5, 4), _static(5), tf.cast(b.labels[:, None], tf.int64), b.x, 3, 5
    ),
    "nn.sampled_softmax_loss": lambda f, b: f(
        _static(5, 4), _static(5), tf.cast(b.labels[:, None], tf.int64), b.x, 3, 5
    ),
    "nn.separable_conv2d": lambda f, b: f(
        b.images, _static(2, 2, 3, 1), _static(1, 1, 3, 2), _ones(4), "SAME"
    ),
    "nn.sigmoid_cross_entropy_with_logits": lambda f, b: f(b.x, b.x),
    "nn.softmax_cross_entropy_with_logits": lambda f, b: f(b.x, b.x),
    "nn.sparse_softmax_cross_entropy_with_logits": lambda f, b: f(b.labels, b.x),
    "nn.sufficient_statistics": lambda f, b: f(b.words, [1])[1:3],
    "nn.top_k": lambda f, b: f(b.x, 2),
    "nn.weighted_cross_entropy_with_logits": lambda f, b: f(b.x, b.x, 2.0),
    "nn.weighted_moments": lambda f, b: f(b.words, [1], b.words),
    # Images.
    "image.adjust_brightness": lambda f, b: f(b.images, 0.1),
    "image.adjust_contrast": lambda f, b: f(b.images, 0.5),
    "image.adjust_hue": lambda f, b: f(b.images, 0.1),
    "image.adjust_saturation": lambda f, b: f(b.images, 0.5),
    "image.adjust_gamma": lambda f, b: f(b.images, 0.5),
    "image.central_crop": lambda f, b: f(b.images, 0.5),
    "image.combined_non_max_suppression": lambda f, b: f(
        b.boxes[:, :, None], b.boxes, 2, 2
    ),
    "image.convert_image_dtype": lambda f, b: f(b.images, tf.uint8),
    "image.crop_and_resize": lambda f, b: f(
        b.images, b.boxes[:, 0], tf.range(_N(b)), [3, 3]
    ),
    "image.crop_to_bounding_box": lambda f, b: f(b.images, 1, 1, 3, 3),
    "image.draw_bounding_boxes": lambda f, b: f(b.images, b.boxes, [[1.0, 0.0, 0.0]]),
    "image.encode_png": lambda f, b: f(tf.cast(b.images, tf.uint8)),
    "image.extract_glimpse": lambda f, b: f(b.images, [2, 2], b.boxes[:, 0, :2]),
    "image.extract_patches": lambda f, b: f(
        b.images, [1, 2, 2, 1], _ones(4), _ones(4), "SAME"
    ),
    "image.grayscale_to_rgb": lambda f, b: f(b.images[..., :1]),
    "image.non_max_suppression_padded": lambda f, b: f(
        b.boxes, b.boxes[:, :, 0], 3, pad_to_max_output_size=True
    ),
    "image.pad_to_bounding_box": lambda f, b: f(b.images, 1, 1, 10, 10),
    "image.psnr": lambda f, b: f(b.images, b.images, 1.0),
    "image.random_brightness": lambda f, b: f(b.images, 0.1),
    "image.random_contrast": lambda f, b: f(b.images, 0.1, 0.5),
    "image.random_crop": lambda f, b: f(b.images, [_N(b), 4, 4, 3]),
    "image.random_hue": lambda f, b: f(b.images, 0.1),
    "image.random_saturation": lambda f, b: f(b.images, 0.1, 0.5),
    "image.stateless_random_brightness": lambda f, b: f(b.images, 0.1, _SEED),
    "image.stateless_random_contrast": lambda f, b: f(b.images, 0.1, 0.5, _SEED),
    "image.stateless_random_crop": lambda f, b: f(b.images, [_N(b), 4, 4, 3], _SEED),
    "image.stateless_random_hue": lambda f, b: f(b.images, 0.1, _SEED),
    "image.stateless_random_saturation": lambda f, b: f(b.images, 0.1, 0.5, _SEED),
    "image.stateless_random_flip_left_right": lambda f, b: f(b.images, _SEED),
    "image.stateless_random_flip_up_down": lambda f, b: f(b.images, _SEED),
    "image.resize": lambda f, b: f(b.images, [3, 3]),
    "image.resize_with_crop_or_pad": lambda f, b: f(b.images, 6, 10),
    "image.resize_with_pad": lambda f, b: f(b.images, 6, 10),
    "image.ssim": lambda f, b: f(b.images, b.images, 1.0, filter_size=3),
    "image.ssim_multiscale": lambda f, b: f(
        b.images, b.images, 1.0, power_factors=(0.5, 0.5), filter_size=3
    ),
    # Signals.
    "signal.dct": lambda f, b: f(b.signal),
    "signal.fftshift": lambda f, b: f(b.words, [1]),
    "signal.ifftshift": lambda f, b: f(b.words, [1]),
    **dict.fromkeys(
        ("signal.fftnd", "signal.ifftnd"),
        lambda f, b: f(b.waves, [4, 6], [-2, -1]),
    ),
    "signal.rfftnd": lambda f, b: f(b.words, [4, 6], [-2, -1]),
    "signal.irfftnd": lambda f, b: f(b.waves, [4, 6], [-2, -1]),
    "signal.fft3d": lambda f, b: f(b.cubes),
    "signal.ifft3d": lambda f, b: f(b.cubes),
    "signal.irfft3d": lambda f, b: f(b.cubes),
    "signal.rfft2d": lambda f, b: f(b.words),
    "signal.rfft3d": lambda f, b: f(b.words[:, None]),
    "signal.frame": lambda f, b: f(b.signal, 8, 4),
    "signal.stft": lambda f, b: f(b.signal, 8, 4),
    "signal.mdct": lambda f, b: f(b.signal, 8),
    "signal.inverse_mdct": lambda f, b: f(b.words),
    "signal.inverse_stft": lambda f, b: f(b.waves[..., :5], 8, 4),
    "signal.overlap_and_add": lambda f, b: f(b.words, 2),
    # Texts.
    "strings.as_string": lambda f, b: f(b.x),
    "strings.format": lambda f, b: f("{}", b.x),
    "strings.join": lambda f, b: f([b.characters, b.characters]),
    "strings.ngrams": lambda f, b: f(b.characters, 2),
    "strings.reduce_join": lambda f, b: f(b.characters, 1),
    "strings.regex_full_match": lambda f, b: f(b.texts, "a.*"),
    "strings.regex_replace": lambda f, b: f(b.texts, "a", "b"),
    "strings.split": lambda f, b: f(b.texts).to_tensor(shape=[None, 3]),
    "strings.bytes_split": lambda f, b: f(b.texts).to_tensor(shape=[None, 3]),
    "strings.substr": lambda f, b: f(b.texts, 0, 2),
    "strings.to_hash_bucket": lambda f, b: f(b.texts, 5),
    "strings.to_hash_bucket_fast": lambda f, b: f(b.texts, 5),
    "strings.to_hash_bucket_strong": lambda f, b: f(b.texts, 5, [1, 2]),
    "strings.unicode_decode": lambda f, b: f(b.texts, "UTF-8").to_tensor(
        shape=[None, 3]
    ),
    "strings.unicode_decode_with_offsets": lambda f, b: f(b.texts, "UTF-8"),
    "strings.unicode_encode": lambda f, b: f(b.ids, "UTF-8"),
    "strings.unicode_script": lambda f, b: f(b.ids),
    "strings.unicode_split": lambda f, b: f(b.texts, "UTF-8").to_tensor(
        shape=[None, 3]
    ),
    "strings.unicode_split_with_offsets": lambda f, b: f(b.texts, "UTF-8"),
    "strings.unicode_transcode": lambda f, b: f(b.texts, "UTF-8", "UTF-16-BE"),
    "strings.unsorted_segment_join": lambda f, b: f(
        tf.transpose(b.characters), [0, 1, 0, 1], 2
    ),
    # Sparse tensors.
    "sparse.add": lambda f, b: f(b.sparse, b.sparse),
    "sparse.bincount": lambda f, b: f(b.sparse_ids, minlength=5, axis=-1),
    "sparse.concat": lambda f, b: f(1, [b.sparse, b.sparse]),
    "sparse.cross": lambda f, b: f([b.sparse_texts, b.sparse_texts]),
    "sparse.cross_hashed": lambda f, b: f([b.sparse_texts, b.sparse_texts], 5),
    "sparse.expand_dims": lambda f, b: f(b.sparse, 1),
    "sparse.fill_empty_rows": lambda f, b: f(b.sparse, 0.0)[0],
    "sparse.from_dense": lambda f, b: f(b.x),
    "sparse.map_values": lambda f, b: f(tf.abs, b.sparse),
    "sparse.mask": lambda f, b: f(tf.IndexedSlices(b.x, b.labels), [0]),
    "sparse.maximum": lambda f, b: f(b.sparse, b.sparse),
    "sparse.minimum": lambda f, b: f(b.sparse, b.sparse),
    "sparse.reduce_max": lambda f, b: f(b.sparse, 1),
    "sparse.reduce_sum": lambda f, b: f(b.sparse, 1),
    "sparse.reorder": lambda f, b: f(b.sparse),
    "sparse.reset_shape": lambda f, b: f(b.sparse, [_N(b), 5]),
    "sparse.reshape": lambda f, b: f(b.sparse, [-1, 2, 2]),
    "sparse.retain": lambda f, b: f(b.sparse, b.sparse.values > 0),
    **{
        f"sparse.segment_{name}": lambda f, b: tf.transpose(
            f(tf.transpose(b.x), [0, 1], [0, 0])
        )
        for name in ("mean", "sqrt_n", "sum")
    },
    "sparse.slice": lambda f, b: f(b.sparse, [0, 1], [_N(b), 2]),
    "sparse.softmax": lambda f, b: f(b.sparse),
    "sparse.sparse_dense_matmul": lambda f, b: f(b.sparse, _static(4, 2)),
    "sparse.split": lambda f, b: f(b.sparse, 2, 1),
    "sparse.to_dense": lambda f, b: f(b.sparse),
    "sparse.to_indicator": lambda f, b: f(b.sparse_ids, 5),
    "sparse.transpose": lambda f, b: f(b.sparse),
    # Ragged tensors.
    "ragged.boolean_mask": lambda f, b: f(b.x, b.flags),
    "ragged.cross": lambda f, b: f([b.ragged, b.ragged]).to_tensor(shape=[None, 3]),
    "ragged.cross_hashed": lambda f, b: f([b.ragged, b.ragged], 5).to_tensor(
        shape=[None, 3]
    ),
    "ragged.map_flat_values": lambda f, b: f(tf.abs, b.ragged_numbers).to_tensor(
        shape=[None, 3]
    ),
    "ragged.row_splits_to_segment_ids": lambda f, b: f(b.ragged.row_splits),
    "ragged.segment_ids_to_row_splits": lambda f, b: f(b.ragged.value_rowids()),
    "ragged.stack": lambda f, b: f([b.ragged, b.ragged], 1).to_tensor(
        shape=[None, 2, 3]
    ),
    "ragged.stack_dynamic_partitions": lambda f, b: f(b.x, b.labels, 3),
}


def names() -> list[str]:
    """Returns the names of the functions of this TensorFlow, such as "nn.relu"."""
    return [
        f"{module}.{name}"
        for module in MODULES
        for name in sorted(dir(getattr(tf, module)))
        if _is_function(getattr(getattr(tf, module), name), name)
    ]


def _is_function(value, name: str) -> bool:
    return callable(value) and not inspect.isclass(value) and not name.startswith("_")


def call(name: str, batch: Batch) -> list[tf.Tensor]:
    """Returns the results of a function for a batch, flat."""
    module, _, attribute = name.partition(".")
    function = getattr(getattr(tf, module), attribute)
    if name in CALLS:
        return _flat(CALLS[name](function, batch))
    for arguments in _TRIED[:: -1 if module == "image" else 1]:
        try:
            return _flat(function(*arguments(batch)))
        except (TypeError, ValueError, AttributeError, IndexError):
            continue
    raise ValueError(f"no call of {name}")


def _flat(results) -> list[tf.Tensor]:
    results = tf.nest.flatten(results, expand_composites=True)
    return [result for result in results if tf.is_tensor(result)]
