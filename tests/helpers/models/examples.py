"""Examples whose parts differ so much that micro-batches' statistics do.

29 of them, in a batch of 18 and one of 11.

B = examples, T = 7 tokens, of which `length` count.
"""

import numpy as np
import tensorflow as tf

EXAMPLES, BATCH, TOKENS, WORDS, CLASSES = 29, 18, 7, 12, 3


def _make_features() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    normal = random.normal
    index = np.arange(EXAMPLES)
    # Sorted in a batch: its micro-batches have other longest sequences, other classes.
    length = 1 + (index % BATCH) * 6 // BATCH
    length[BATCH:] += 1
    mask = random.random(EXAMPLES) < 0.5
    mask[5:10], mask[[0, 18, 28]] = False, True  # one micro-batch has none
    ids = random.integers(1, WORDS, [EXAMPLES, TOKENS])
    ids[::3, 1] = ids[::3, 0]
    return {
        "x": normal(size=[EXAMPLES, 4]) + 0.1 * (index % 5)[:, None],
        "y": normal(size=[EXAMPLES, 3]) * np.linspace(0.2, 2, EXAMPLES)[:, None],
        "w": random.random(EXAMPLES) * (1 + index % 6) + 0.1,
        "mask": mask.astype(np.float64),
        "cls": (random.integers(0, 5, EXAMPLES) // 2).astype(np.int32),
        "group": (index % BATCH // 4).astype(np.int32),
        "pair": normal(size=[EXAMPLES, 4]) + 0.3,
        "seq": normal(size=[EXAMPLES, TOKENS, 4]),
        "length": length.astype(np.int32),
        "tags": random.integers(0, CLASSES, [EXAMPLES, TOKENS]).astype(np.int32),
        "ids": (ids * (np.arange(TOKENS) < length[:, None])).astype(np.int32),
        "types": random.integers(0, 2, [EXAMPLES, TOKENS]).astype(np.int32),
        # Alike for the first examples of each batch; for all of the first batch.
        "late": np.where(index % BATCH < 12, 0, 1 + index % 3).astype(np.int32),
        "later": np.where(index < BATCH + 3, 0, 1 + index % 3).astype(np.int32),
        "at": random.integers(0, TOKENS, [EXAMPLES, 2]).astype(np.int32),
        "image": normal(size=[EXAMPLES, 6, 6, 2]),
        "word": np.array([f"word {i}" for i in random.integers(0, 6, EXAMPLES)]),
    }


FEATURES = _make_features()
# Of unequal numbers of values per example: made in the dataset's graph.
COMPOSED = ("ragged", "sparse", "padded", "growing")


def make_dataset(names, drop_remainder: bool = False) -> tf.data.Dataset:
    """Returns batches of ({name: feature}, y), again and again.

    Args:
        names: Keys of `FEATURES` or entries of `COMPOSED`.
        drop_remainder: Whether every batch has `BATCH` examples, statically.
    """
    parts = {name: FEATURES[name] for name in names if name in FEATURES}
    rows, length = FEATURES["seq"], FEATURES["length"].astype(np.int64)
    values = np.concatenate([row[:n] for row, n in zip(rows, length, strict=True)])
    values += 0.2 * np.repeat(length, length)[:, None]
    if "ragged" in names:
        parts["ragged"] = tf.RaggedTensor.from_row_lengths(values, length)
    if "sparse" in names:
        places = [(i, j) for i, n in enumerate(length) for j in range(n)]
        parts["sparse"] = tf.SparseTensor(places, values[:, 0], [EXAMPLES, TOKENS])
    if "padded" in names:
        parts |= {"padded": rows, "length": FEATURES["length"]}
    if "growing" in names:  # one token in the first batch, more in the second
        lengths = 1 + 4 * (np.arange(EXAMPLES) >= BATCH)
        parts |= {"growing": rows, "length": lengths.astype(np.int32)}
    data = tf.data.Dataset.from_tensor_slices((parts, FEATURES["y"]))
    cut = {"padded", "growing"} & {*names}
    if not cut:
        return data.batch(BATCH, drop_remainder=drop_remainder).repeat()

    def shorten(features, y):
        length = features["length"]
        return {**features, **{name: features[name][:length] for name in cut}}, y

    return data.map(shorten).padded_batch(BATCH).repeat()
