"""IDX files or generated digits, with each worker's share."""

import gzip
import itertools
import struct

import numpy as np
import pytest
import tensorflow as tf

from distributed import digits, input_pipeline
from distributed.input_pipeline import places
from distributed.inputs import Examples, checksum, load_examples
from estimator_accum.programs.batches import Batches

pytestmark = pytest.mark.once


def _idx(array: np.ndarray) -> bytes:
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return head + array.astype(np.uint8).tobytes()


def _write(folder, kind, num_images, *, first_label=0) -> Examples:
    images = np.arange(num_images * 16).reshape(num_images, 4, 4) % 251
    labels = (np.arange(num_images) + first_label) % 10
    (folder / f"{kind}-images-idx3-ubyte").write_bytes(_idx(images))
    with gzip.open(folder / f"{kind}-labels-idx1-ubyte.gz", "wb") as file:
        file.write(_idx(labels))
    return Examples(images.astype(np.uint8), labels.astype(np.int32))


def _assert_same(ours: Examples, theirs: Examples) -> None:
    np.testing.assert_array_equal(ours.images, theirs.images)
    np.testing.assert_array_equal(ours.labels, theirs.labels)
    assert (ours.images.dtype, ours.labels.dtype) == (np.uint8, np.int32)


def test_idx_files_are_read_with_and_without_gz(tmp_path):
    wanted = _write(tmp_path, "train", 7), _write(tmp_path, "t10k", 3, first_label=2)
    for ours, theirs in zip(load_examples(str(tmp_path)), wanted, strict=True):
        _assert_same(ours, theirs)


def test_test_images_alone_are_split(tmp_path):
    images, labels = _write(tmp_path, "t10k", 15)
    train, test = load_examples(str(tmp_path))
    _assert_same(train, Examples(images[:14], labels[:14]))
    _assert_same(test, Examples(images[14:], labels[14:]))


def test_real_test_images_are_read(real_data):
    train, test = load_examples(str(real_data / "mnist"))
    assert (train.images.shape, test.images.shape) == ((9000, 28, 28), (1000, 28, 28))
    assert train.labels[:5].tolist() == [7, 2, 1, 0, 4]


_IMAGES, _LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
_CUT = _idx(np.zeros([7, 4, 4]))[:-1]
_FEWER, _WIDER = _idx(np.zeros([6, 4, 4])), _idx(np.zeros([7, 5, 4]))
_TENS = _idx(np.array([0, 1, 10, 11, 0, 0, 0]))


@pytest.mark.parametrize(
    "name, content, sentence",
    [
        (_IMAGES, b"", r"begins with nothing, not 00000803\. "),
        (_IMAGES, b"\0\0\x08\x01\0\0\0\0", r"begins with 00000801,"),
        (_IMAGES, b"\0\0\x08\x03\0\0\0", r"an IDX file of unsigned"),
        (_IMAGES, _CUT, r"the 128 bytes that its head speaks of\. Received: 127\. "),
        (_IMAGES, _FEWER, r"Received: 6 images and 7 labels\. "),
        (_IMAGES, _WIDER, r"Received: 3 of \(4, 4\) and \(5, 4\)\. "),
        (_LABELS, _TENS, r"labels of 0 to 9\. Received: 10, the label 3\. "),
        (f"{_LABELS}.gz", b"\x1f\x8b\x08", r"undamaged\. .*fetch_mnist"),
        (f"{_LABELS}.gz", None, r"No such file.*fetch_mnist\.py\."),
    ],
)
def test_damaged_file_is_refused(tmp_path, name, content, sentence):
    _write(tmp_path, "train", 7)
    _write(tmp_path, "t10k", 3)
    path = tmp_path / name
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        load_examples(str(tmp_path))


def test_folder_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"`--data_dir` must be a folder\. .*nowhere"):
        load_examples("nowhere")


def test_generated_digits_are_the_same_again_and_all_ten():
    train, test = load_examples(None)
    _assert_same(train, Examples(*digits.generate(2000, seed=0)))
    assert (train.images.shape, test.images.shape) == ((2000, 28, 28), (500, 28, 28))
    assert set(train.labels) == set(test.labels) == set(range(10))
    assert checksum(train) != checksum(test)


def test_generated_digits_look_like_their_glyphs():
    images, labels = digits.generate(400, seed=3)
    means = np.stack([images[labels == digit].mean(0) for digit in range(10)])
    nearest = np.square(images[:, None] - means).sum((2, 3)).argmin(1)
    assert np.mean(nearest == labels) > 0.6  # by chance: 0.1
    assert images.mean() < 80 and images.max() == 255  # mostly black, white strokes


@pytest.mark.parametrize("shuffle", [False, True])
def test_each_epoch_has_each_example_once(shuffle):
    stream = places(0, 21, 7, shuffle, seed=0).reshape(3, 7)
    for epoch in stream:
        assert sorted(epoch) == list(range(7))
    is_in_order = [epoch.tolist() == list(range(7)) for epoch in stream]
    assert is_in_order == [not shuffle] * 3
    assert (stream[0].tolist() == stream[1].tolist()) is not shuffle
    # The same order, wherever it is cut.
    cut = [places(n, n + 3, 7, shuffle, seed=0) for n in range(0, 21, 3)]
    np.testing.assert_array_equal(np.concatenate(cut), stream.reshape(-1))


def _numbered(count: int) -> Examples:
    """Returns examples whose pixels and label are the example's number."""
    numbers = np.arange(count, dtype=np.int32)
    images = np.broadcast_to(numbers[:, None, None], [count, 2, 2])
    return Examples(images.astype(np.uint8), numbers)


def _labels(dataset, count) -> list[list[int]]:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        iterator = tf.compat.v1.data.make_one_shot_iterator(dataset())
        features, labels = iterator.get_next()
        result = []
        for _ in range(count):
            shown, read = session.run([labels, features])
            for part in (read["image"][:, 0, 0], read["number"]):
                assert part.tolist() == shown.tolist()
            result.append(shown.tolist())
        return result


@pytest.mark.parametrize("workers, steps", [(1, 1), (2, 1), (3, 2), (2, 3)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_workers_read_everything_once_also_after_a_restart(workers, steps, shuffle):
    examples = _numbered(23)  # a prime: nothing divides
    batches = Batches(10, steps, workers)

    def read(rank, first_update, updates):
        options = {"shuffle": shuffle, "seed": 5, "first_update": first_update}
        dataset = input_pipeline.train_input_fn(
            examples, batches, replicas=[rank], **options
        )
        return _labels(dataset, updates * steps)

    whole = [read(rank, 0, 5) for rank in range(workers)]
    stream = places(0, 50, 23, shuffle, seed=5).tolist()
    # Ordered by micro-step, then by worker.
    in_order = itertools.chain.from_iterable(zip(*whole, strict=True))
    assert list(itertools.chain.from_iterable(in_order)) == stream
    for rank in range(workers):
        assert read(rank, 3, 2) == whole[rank][3 * steps :]


def test_replicas_of_one_task_take_turns_in_each_micro_step():
    dataset = input_pipeline.train_input_fn(
        _numbered(23), Batches(8, 2, 4), replicas=range(2, 4), shuffle=False, seed=0
    )
    assert _labels(dataset, 6) == [[2], [3], [6], [7], [10], [11]]


def test_workers_that_take_turns_read_every_second_update():
    options = {"replicas": [0], "shuffle": False, "seed": 0}
    for first in range(2):
        dataset = input_pipeline.train_input_fn(
            _numbered(23), Batches(4, 2, 1), first_update=first, stride=2, **options
        )
        starts = [4 * first, 4 * first + 2, 8 + 4 * first, 8 + 4 * first + 2]
        assert _labels(dataset, 4) == [[n, n + 1] for n in starts]


def test_evaluation_reads_each_example_once():
    dataset = input_pipeline.eval_input_fn(_numbered(7), 3)
    assert _labels(dataset, 3) == [[0, 1, 2], [3, 4, 5], [6]]
    with pytest.raises(tf.errors.OutOfRangeError):
        _labels(dataset, 4)
