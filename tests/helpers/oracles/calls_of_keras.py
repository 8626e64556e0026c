"""Every layer of `keras.layers`, called with a batch of examples.

n = number of examples, which is not known.
"""

import importlib
import inspect
import itertools
from collections.abc import Callable
from unittest import mock

import tensorflow as tf

from estimator_accum.rows.analysis import Analysis

_SHAPES = {
    "x": ([4], tf.float32),
    "words": ([6, 4], tf.float32),
    "images": ([8, 8, 3], tf.float32),
    "volumes": ([4, 4, 4, 2], tf.float32),
    "films": ([3, 8, 8, 3], tf.float32),
    "lines": ([3, 8, 2], tf.float32),
    "solids": ([3, 4, 4, 4, 2], tf.float32),
    "waves": ([256], tf.float32),
    "sounds": ([64, 1], tf.float32),
    "ids": ([4], tf.int32),
    "texts": ([], tf.string),
}

# Layers that take no tensor, with the reason.
NO_TENSOR = {
    **dict.fromkeys(
        ("Layer", "Wrapper", "InputSpec", "InputLayer", "AbstractRNNCell"),
        "computes nothing by itself",
    ),
    **dict.fromkeys(
        ("FlaxLayer", "JaxLayer", "TorchModuleWrapper"), "runs another framework"
    ),
    "TFSMLayer": "runs a saved model",
    "DenseFeatures": "takes feature columns, which are split",
    "MaxNumBoundingBoxes": "takes bounding boxes",
}


if not hasattr(importlib.import_module("keras"), "ops"):
    NO_TENSOR["SpectralNormalization"] = "not tried: the test has no AutoGraph"

LAYERS: dict[str, tuple[Callable, str]] = {}


def _for(inputs: str, **makers: Callable) -> None:
    for name, make in makers.items():
        LAYERS[name] = make, inputs


for _size, _input in (("1D", "words"), ("2D", "images"), ("3D", "volumes")):
    _by_name = {
        "Conv": lambda f: f(2, 2, dilation_rate=2),
        "Convolution": lambda f: f(2, 2, dilation_rate=2),
        "DepthwiseConv": lambda f: f(2),
        "SeparableConv": lambda f: f(2, 2),
        "SeparableConvolution": lambda f: f(2, 2),
        "LocallyConnected": lambda f: f(2, 2),
        "AdaptiveAveragePooling": lambda f: f(2),
        "AdaptiveMaxPooling": lambda f: f(2),
        "SpatialDropout": lambda f: f(0.5),
    }
    for _name in ("AveragePooling", "AvgPool", "MaxPool", "MaxPooling"):
        _by_name[_name] = lambda f: f(2)
    for _name in (
        *("Cropping", "GlobalAveragePooling", "GlobalAvgPool", "GlobalMaxPool"),
        *("GlobalMaxPooling", "UpSampling", "ZeroPadding"),
    ):
        _by_name[_name] = lambda f: f()
    for _name, _make in _by_name.items():
        LAYERS[f"{_name}{_size}"] = _make, _input
    for _name in ("Conv", "Convolution"):
        LAYERS[f"{_name}{_size}Transpose"] = lambda f: f(2, 2), _input
for _size, _input in (("1D", "lines"), ("2D", "films"), ("3D", "solids")):
    LAYERS[f"ConvLSTM{_size}"] = lambda f: f(2, 2), _input

_for(
    "x",
    Activation=lambda f: f("gelu"),
    ActivityRegularization=lambda f: f(),
    AlphaDropout=lambda f: f(0.5),
    BatchNormalization=lambda f: f(),
    Dense=lambda f: f(2),
    Discretization=lambda f: f([0.0, 1.0]),
    Dropout=lambda f: f(0.5),
    ELU=lambda f: f(),
    GaussianDropout=lambda f: f(0.5),
    GaussianNoise=lambda f: f(0.5),
    GroupNormalization=lambda f: f(2),
    Identity=lambda f: f(),
    Lambda=lambda f: f(lambda z: z * 2),
    LayerNormalization=lambda f: f(),
    LeakyReLU=lambda f: f(),
    Normalization=lambda f: f(mean=0.0, variance=1.0),
    PReLU=lambda f: f(),
    ReLU=lambda f: f(),
    RepeatVector=lambda f: f(3),
    Rescaling=lambda f: f(0.5),
    Reshape=lambda f: f([2, 2]),
    RMSNormalization=lambda f: f(),
    Softmax=lambda f: f(),
    SpectralNormalization=lambda f: f(_layers().Dense(2)),
    ThresholdedReLU=lambda f: f(),
    UnitNormalization=lambda f: f(),
)
_for(
    "words",
    Bidirectional=lambda f: f(_layers().GRU(2)),
    EinsumDense=lambda f: f("abc,cd->abd", (6, 3)),
    Flatten=lambda f: f(),
    GRU=lambda f: f(2),
    LSTM=lambda f: f(2),
    Masking=lambda f: f(),
    Permute=lambda f: f([2, 1]),
    RNN=lambda f: f(_layers().GRUCell(2)),
    SimpleRNN=lambda f: f(2),
    TimeDistributed=lambda f: f(_layers().Dense(2)),
)
_for(
    "waves",
    MelSpectrogram=lambda f: f(32, num_mel_bins=4, sampling_rate=100),
)
_for(
    "sounds",
    STFTSpectrogram=lambda f: f(
        frame_length=32, frame_step=16, fft_length=32, window=None
    ),
)
_for(
    "x x",
    Add=lambda f: f(),
    Average=lambda f: f(),
    Concatenate=lambda f: f(),
    Maximum=lambda f: f(),
    Minimum=lambda f: f(),
    Multiply=lambda f: f(),
    Subtract=lambda f: f(),
    Dot=lambda f: f(1),
)
_for(
    "words words",
    AdditiveAttention=lambda f: f(),
    Attention=lambda f: f(),
)
LAYERS["MultiHeadAttention"] = lambda f: f(2, 2), "words, words"
LAYERS["GroupQueryAttention"] = lambda f: f(2, 4, 2), "words, words"
for _name in ("GRUCell", "SimpleRNNCell", "LSTMCell"):
    LAYERS[_name] = lambda f: f(4), "x, state"
LAYERS["StackedRNNCells"] = lambda f: f([_layers().GRUCell(4)]), "x, state"
_for(
    "ids",
    CategoryEncoding=lambda f: f(5, output_mode="multi_hot"),
    Embedding=lambda f: f(5, 3),
    IntegerLookup=lambda f: f(vocabulary=[1, 2, 3]),
    ReversibleEmbedding=lambda f: f(5, 3),
)
_for(
    "texts",
    Hashing=lambda f: f(5),
    StringLookup=lambda f: f(vocabulary=["a", "b"]),
    TextVectorization=lambda f: f(vocabulary=["a", "b"], output_sequence_length=4),
)
_for("texts texts", HashedCrossing=lambda f: f(5))
_for(
    "images",
    AugMix=lambda f: f((0, 1)),
    AutoContrast=lambda f: f(value_range=(0, 1)),
    CenterCrop=lambda f: f(4, 4),
    ContrastLimitedAdaptiveHistogramEqualization=lambda f: f((0, 1)),
    CutMix=lambda f: f(),
    Equalization=lambda f: f(value_range=(0, 1)),
    MixUp=lambda f: f(),
    Pipeline=lambda f: f([_layers().CenterCrop(4, 4)]),
    RandAugment=lambda f: f((0, 1)),
    RandomBrightness=lambda f: f(0.5),
    RandomColorDegeneration=lambda f: f(0.5),
    RandomColorJitter=lambda f: f((0, 1), 0.5, 0.5, 0.5, 0.5),
    RandomContrast=lambda f: f(0.5),
    RandomCrop=lambda f: f(4, 4),
    RandomElasticTransform=lambda f: f(),
    RandomErasing=lambda f: f(),
    RandomFlip=lambda f: f(),
    RandomGaussianBlur=lambda f: f(),
    RandomGrayscale=lambda f: f(),
    RandomHeight=lambda f: f(0.5),
    RandomHue=lambda f: f(0.5, value_range=(0, 1)),
    RandomInvert=lambda f: f(value_range=(0, 1)),
    RandomPerspective=lambda f: f(),
    RandomPosterization=lambda f: f(4, value_range=(0, 1)),
    RandomRotation=lambda f: f(0.5),
    RandomSaturation=lambda f: f(0.5, value_range=(0, 1)),
    RandomSharpness=lambda f: f(0.5, value_range=(0, 1)),
    RandomShear=lambda f: f(0.5),
    RandomTranslation=lambda f: f(0.5, 0.5),
    RandomWidth=lambda f: f(0.5),
    RandomZoom=lambda f: f(0.5),
    Resizing=lambda f: f(4, 4),
    Solarization=lambda f: f(value_range=(0, 1)),
)


def _layers():
    return importlib.import_module("keras").layers


def names() -> list[str]:
    """Returns the names of the layers of this Keras."""
    layers = _layers()
    return [
        name
        for name in sorted(dir(layers))
        if inspect.isclass(getattr(layers, name)) and not name.startswith("_")
    ]


def traced() -> tuple[Callable[[], Analysis], dict[str, list[tf.Tensor]]]:
    """Returns a maker of analyses, and the results of every layer in training, by name.

    The layers are called in one graph, to save time.
    """
    keras = importlib.import_module("keras")
    layers = {
        name: LAYERS[name][0](getattr(keras.layers, name))
        for name in names()
        if name not in NO_TENSOR
    }
    results = {}
    generator, method, size = tf.random.Generator, "skip", 3  # of Keras 2
    if hasattr(keras, "ops"):
        generator, method, size = keras.random.SeedGenerator, "next", 2

    def call(*parts):
        *parts, state = parts  # in micro-batches it depends on their place
        batch = dict(zip(_SHAPES, parts, strict=True))
        turns = itertools.count()
        with (
            mock.patch.object(generator, method, lambda *_, **__: state),
            # AugMix chooses its layers by it, without a seed: here each in its turn.
            mock.patch("random.choice", lambda names: names[next(turns) % len(names)]),
        ):
            for name, layer in layers.items():
                outputs = tf.nest.flatten(_call(layer, name, batch))
                results[name] = [t for t in outputs if tf.is_tensor(t)]

    specs = [tf.TensorSpec([None, *shape], dtype) for shape, dtype in _SHAPES.values()]
    function = tf.function(call, autograph=False)
    state = tf.TensorSpec([size], tf.int64)
    graph = function.get_concrete_function(*specs, state).graph
    parts = graph.inputs[: len(_SHAPES)]
    return (lambda: Analysis(parts)), results


def _call(layer, name: str, batch: dict):
    arguments = []
    for group in LAYERS[name][1].split(", "):
        if group == "state":
            states = [batch["x"]] * (2 if name == "LSTMCell" else 1)
            arguments.append(states)
        else:
            tensors = [batch[name] for name in group.split()]
            arguments.append(tensors if len(tensors) > 1 else tensors[0])
    takes = inspect.signature(type(layer).call).parameters
    return layer(*arguments, **({"training": True} if "training" in takes else {}))
