"""The page of all functions, by the answers of the analysis of rows.

    python -m tests.helpers.oracles.split_table

writes it anew for the installed TensorFlow; names of other versions stay.
"""

import importlib
import pathlib
import re
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from estimator_accum.rows.analysis import Analysis
from estimator_accum.rows.states import NO_RULE
from tests.helpers.oracles import calls_of_keras, calls_of_tensorflow

PAGE = pathlib.Path(__file__).resolve().parents[3] / "docs/rows.md"
_INTRODUCTION = """# Functions and layers

A batch is split into [micro-batches](update.md#words) as far as each row of a result is
computed from its own example, which is proved from the graph, operation by operation. This
page lists the functions of TensorFlow and the layers of Keras, called as in training, by
the answer. It is generated: a test asks the analysis about each name of the installed
TensorFlow.

* **split**: computed in micro-batches.
* **unsplit**: the result combines the examples, or random numbers that they share. It is
  computed from the whole batch, with all that follows.
* **no rule**: each row may be of its own example, but the analysis has no proof. The result
  is computed unsplit, too.
* **no batch**: the function takes no batch, or was not tried.

Arguments matter: a sum along the examples is not split, for instance. The functions are
called with rows along the first axis, and reduce or look up others.
"""
# Types of operations without a rule that combine examples.
_COMBINING = {
    **dict.fromkeys(
        ("InvertPermutation", "L2Loss", "StringFormat"), "combines the examples"
    ),
    "DepthwiseConv2dNativeBackpropFilter": "combines the examples",
    "LogUniformCandidateSampler": "draws the same classes for all examples",
    "FractionalAvgPool": "draws the same regions for all images",
    "FractionalMaxPool": "draws the same regions for all images",
}
# Functions that an analysis of numbers could split, and why a rule refuses them.
_WITHOUT_PROOF = {
    "nn.ctc_loss": "`v1.nn.ctc_loss` is split",
    "image.non_max_suppression_padded": "its loop ends when the batch is done; "
    "`combined_non_max_suppression` is split",
    "image.ssim_multiscale": "the padding depends on the size",
    "strings.ngrams": "of a matrix; ngrams of a ragged tensor are split",
    "sparse.transpose": "the examples are no longer the first axis",
    "ContrastLimitedAdaptiveHistogramEqualization": "it looks up tiles by number",
}
# What else to know of those that are not split.
_NOTES = {
    "nn.isotonic_regression": "rows differed beside other rows when a rule was tried",
    "image.extract_glimpse": '`noise="zero"` is split',
    **dict.fromkeys(
        ("image.random_crop", "image.stateless_random_crop"),
        "all images share one random place",
    ),
    **dict.fromkeys(
        ("signal.fftnd", "signal.ifftnd", "signal.rfftnd", "signal.irfftnd"),
        "it does not run on processors, where rules are tried; `fft2d` is split",
    ),
    "ragged.segment_ids_to_row_splits": "it is split with `num_segments`",
    "sparse.bincount": "`tf.math.bincount` with `minlength` and `maxlength` is split",
}
_ROW = re.compile(r"\| `(\w+)` \| ([\w ]+) \| (.*) \|")


class Place(NamedTuple):
    """The answer about one name.

    Attributes:
        answer: "split", "unsplit", "no rule" or "no batch".
        reason: The reason, if it is not split.
    """

    answer: str
    reason: str = ""


def places_of_functions() -> dict[str, dict[str, Place]]:
    """Returns the answers of the installed TensorFlow, by section and name."""
    with tf.Graph().as_default():
        batch = calls_of_tensorflow.Batch()
        places = {
            name: Place("no batch", calls_of_tensorflow.NO_BATCH[name])
            if name in calls_of_tensorflow.NO_BATCH
            else place_of(
                name,
                calls_of_tensorflow.call(name, batch),
                Analysis(batch.parts.values()),
            )
            for name in calls_of_tensorflow.names()
        }
    sections = {}
    for name, place in places.items():
        module, _, attribute = name.partition(".")
        sections.setdefault(f"tf.{module}", {})[attribute] = place
    return sections


def places_of_layers() -> dict[str, dict[str, Place]]:
    """Returns the answers of the installed Keras."""
    new_analysis, results = calls_of_keras.traced()
    version = importlib.import_module("keras").__version__[0]
    places = {
        name: Place("no batch", calls_of_keras.NO_TENSOR[name])
        for name in calls_of_keras.names()
        if name in calls_of_keras.NO_TENSOR
    }
    for name, tensors in results.items():
        with tensors[0].graph.as_default():
            places[name] = place_of(name, tensors, new_analysis())
    return {f"keras.layers of Keras {version}": dict(sorted(places.items()))}


def place_of(name: str, tensors: list[tf.Tensor], analysis: Analysis) -> Place:
    """Returns the answer about the results of a name."""
    analysis.analyze(tensors)
    is_split = all(analysis.state(tensor).kind != "mixed" for tensor in tensors)
    mixing = {origin.operation for origin in analysis.origins}
    is_split |= mixing <= analysis.short.keys()  # a batch adds the rows
    if is_split and name not in (_WITHOUT_PROOF | _NOTES):
        return Place("split")
    if is_split:
        raise AssertionError(f"{name} is split: delete its reason")
    operation, reason = analysis.origins[0]
    if name in _WITHOUT_PROOF:
        return Place("no rule", _WITHOUT_PROOF[name])
    note = f"; {_NOTES[name]}" if name in _NOTES else ""
    if reason == NO_RULE and operation.type not in _COMBINING:
        return Place("no rule", f"`{operation.type}` has no rule{note}")
    if reason == NO_RULE:
        return Place("unsplit", f"`{operation.type}` {_COMBINING[operation.type]}")
    return Place("unsplit", f"`{operation.type}`: {reason}{note}")


def read(page: str) -> dict[str, dict[str, Place]]:
    """Returns the answers on a page, by section and name."""
    sections = {}
    for section in page.split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        split, _, rest = text.partition("\n\n|")
        places = {name: Place("split") for name in re.findall(r"`(\w+)`", split)}
        places |= {row[1]: Place(row[2], row[3]) for row in _ROW.finditer(rest)}
        sections[title.replace("`", "")] = places
    return sections


def write(sections: dict[str, dict[str, Place]]) -> str:
    """Returns the page."""
    texts = [_INTRODUCTION]
    for title, places in sections.items():
        names = sorted(places)
        split = ", ".join(f"`{n}`" for n in names if places[n].answer == "split")
        rows = [
            f"| `{name}` | {places[name].answer} | {places[name].reason} |"
            for name in names
            if places[name].answer != "split"
        ]
        module, _, kind = title.partition(" ")
        lines = "\n".join(["| name | answer | reason |", "|---|---|---|", *rows])
        texts.append(
            f"## `{module}` {kind}".rstrip() + f"\n\nSplit: {split}.\n\n{lines}\n"
        )
    return "\n".join(texts)


def main(
    makers: tuple[Callable, ...] = (places_of_functions, places_of_layers),
) -> None:
    """Writes the page."""
    sections = read(PAGE.read_text()) if PAGE.exists() else {}
    for make in makers:
        for title, places in make().items():
            sections[title] = sections.get(title, {}) | places
    PAGE.write_text(write(sections))


if __name__ == "__main__":
    main()
