"""The order of a run's examples."""

import itertools
import re
from unittest import mock

import numpy as np
import pytest

from bert_finetune import windows as windows_module
from bert_finetune.tasks import get_task, read_examples
from bert_finetune.windows import epoch_order, make_windows, with_fastest_tokens
from estimator_accum.programs.batches import Batches

pytestmark = pytest.mark.once
_CUTS = [(1, 1), (4, 1), (1, 2), (2, 2), (3, 2), (1, 5), (7, 3)]


def _windows(size=4, steps=1, replicas=1, num_examples=23, num_train_epochs=3, seed=1):
    """Returns windows of size x steps x replicas examples."""
    batches = Batches(size * steps * replicas, steps, replicas)
    return make_windows(num_examples, num_train_epochs, batches, seed)


def _rows(*args, **kwargs):
    return [rows.tolist() for rows in _windows(*args, **kwargs).stream()]


def _flat(parts):
    return [row for part in parts for row in part]


def test_each_epoch_uses_every_example_exactly_once():
    stream = _flat(_rows())
    epochs = [stream[start : start + 23] for start in (0, 23, 46)]
    assert len(stream) == 69
    assert [sorted(epoch) for epoch in epochs] == [list(range(23))] * 3
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert epochs[0] != sorted(epochs[0])


def test_order_is_a_function_of_seed_and_epoch():
    assert _rows(seed=1) == _rows(seed=1)
    assert _rows(seed=1) != _rows(seed=2)
    # seed + epoch would repeat another seed's orders one epoch later.
    assert epoch_order(50, 8, 1).tolist() != epoch_order(50, 7, 2).tolist()


def test_order_is_the_same_under_every_version_of_numpy():
    first = epoch_order(10, seed=3, epoch=1)
    assert first.tolist() == [9, 7, 8, 3, 5, 6, 4, 0, 2, 1]
    largest = epoch_order(10, seed=2**64 - 1, epoch=0)
    assert largest.tolist() == [8, 9, 0, 7, 4, 2, 6, 3, 1, 5]


def test_fraction_of_an_epoch_is_cut_from_its_order():
    assert _flat(_rows(num_train_epochs=1.5)) == _flat(_rows(num_train_epochs=3.0))[:34]
    assert len(_flat(_rows(num_train_epochs=0.1))) == 2


def test_micro_batches_cross_epochs_and_only_the_last_is_short():
    sizes = [len(rows) for rows in _rows(4, steps=3)]
    assert sizes == [4] * 17 + [1]
    assert len(sizes) == _windows(4, steps=3).num_micro_steps()
    larger_than_the_data = _rows(50)
    assert [len(rows) for rows in larger_than_the_data] == [50, 19]
    assert sorted(larger_than_the_data[0][:23]) == list(range(23))


@pytest.mark.parametrize("num_train_epochs", [1.0, 2.7, 3.0])
@pytest.mark.parametrize(("steps", "replicas"), _CUTS)
def test_any_cut_of_a_window_holds_the_same_examples(num_train_epochs, steps, replicas):
    """301 examples, windows of 42: neither they nor most cuts divide evenly."""
    whole = make_windows(301, num_train_epochs, Batches(42, 1, 1), seed=5)
    cut = make_windows(301, num_train_epochs, Batches(42, steps, replicas), seed=5)
    assert whole.num_updates == cut.num_updates == -(-int(301 * num_train_epochs) // 42)
    micro_steps = 0
    for update in range(cut.num_updates):
        shares = cut.shares(update)
        assert whole.examples(update).dtype == np.int64
        assert all(len(step) == replicas for step in shares)
        numbers = _flat(_flat(shares))
        assert sorted(numbers) == sorted(whole.examples(update))
        assert replicas > 1 or numbers == whole.examples(update).tolist()
        sizes = [len(share) for step in shares for share in step]
        if update < cut.num_updates - 1:
            assert len(shares) == steps and max(sizes) - min(sizes) <= 1
        else:
            assert all(any(len(share) for share in step) for step in shares)
        micro_steps += len(shares)
    assert cut.num_micro_steps() == micro_steps


def _sorted_windows(tokens=None, batches=Batches(32, 4, 1)):  # noqa: B008, frozen
    lengths = np.random.default_rng(0).integers(3, 17, 301)
    return lengths, make_windows(301, 2.7, batches, 5, lengths, tokens)


def test_sorted_windows_hold_the_same_examples_from_the_shortest_to_the_longest():
    lengths, windows = _sorted_windows()
    plain = make_windows(301, 2.7, Batches(32, 4, 1), 5)
    padded = {id(windows): 0, id(plain): 0}
    for update in range(plain.num_updates):
        ours, theirs = windows.shares(update), plain.shares(update)
        numbers = _flat(_flat(ours))
        assert sorted(numbers) == sorted(_flat(_flat(theirs)))
        assert [len(step[0]) for step in ours] == [len(step[0]) for step in theirs]
        assert np.all(np.diff(lengths[numbers]) >= 0)
        for which, shares in ((windows, ours), (plain, theirs)):
            padded[id(which)] += sum(len(s) * lengths[s].max() for (s,) in shares)
    assert padded[id(windows)] < 0.9 * padded[id(plain)]


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("tokens", [16, 40, 41, 200, 10_000])
def test_micro_batches_hold_as_many_examples_as_tokens_allow(tokens, replicas):
    lengths, windows = _sorted_windows(tokens, Batches(32, 1, replicas))
    counts, used = [], []
    for update in range(windows.num_updates):
        shares = windows.shares(update)
        counts.append(len(shares))
        for step in shares:
            padded = [len(share) * lengths[share].max(initial=0) for share in step]
            assert max(padded) <= tokens
            used += _flat(step)
        for step, following in itertools.pairwise(shares):
            one_more = np.sort(lengths[[*_flat(step), following[0][0]]])
            rows = -(-len(one_more) // replicas)
            assert rows * one_more[-1] > tokens  # the next one did not fit
    assert windows.micro_steps_by_update.tolist() == counts
    assert windows.num_micro_steps() == sum(counts)
    assert windows.num_micro_steps(3, 1) == sum(counts[3:]) - 1
    assert windows.num_micro_steps(windows.num_updates) == 0
    whole = make_windows(301, 2.7, Batches(32, 1, 1), 5)
    assert sorted(used) == sorted(_flat(whole.stream()))


def test_tokens_that_do_not_hold_the_longest_example_are_refused():
    message = "hold the longest example. Received: 15, for examples of up to 16 tokens"
    with pytest.raises(ValueError, match=message):
        _sorted_windows(15)


def test_cola_needs_a_fifth_more_tokens_than_there_are(real_data):
    """8 x 4: sorted 1.21 tokens for each real one, in the stream's order 1.61."""
    cola = real_data / "cola"
    rows = read_examples(get_task("CoLA"), cola, "train.tsv", labelled=True)
    # About as many tokens as WordPiece gives with BERT's vocabulary.
    words = [len(re.findall(r"\w+|[^\w\s]", row.text_a)) for row in rows]
    lengths = np.minimum(np.array(words) + 2, 128)
    share = {}
    for name, by in (("sorted", lengths), ("plain", None)):
        stream = make_windows(len(rows), 1.0, Batches(32, 4, 1), 0, by).stream()
        share[name] = sum(len(s) * lengths[s].max() for s in stream) / lengths.sum()
    assert share["sorted"] < 1.24 and share["plain"] > 1.5
    assert 128 / lengths.mean() > 10


def test_replicas_read_the_parts_of_one_alone():
    windows = _windows(2, steps=3, replicas=3)
    streams = [list(windows.stream([replica])) for replica in range(3)]
    together = list(windows.stream(range(3)))
    assert [len(stream) for stream in streams] == [windows.num_micro_steps()] * 3
    turns = [share for step in zip(*streams, strict=True) for share in step]
    assert [t.tolist() for t in together] == [t.tolist() for t in turns]
    assert sorted(_flat(together)) == sorted(_flat(_rows(18)))


def test_workers_that_take_turns_read_all_windows_again_and_again():
    windows = _windows(4, steps=3)
    whole = [shares[0].tolist() for n in range(6) for shares in windows.shares(n)]
    streams = [windows.stream((0,), update, 0, 2) for update in range(2)]
    turns = [
        next(stream).tolist() for _ in range(6) for stream in streams for _ in "123"
    ]
    assert turns == whole[:18] + whole[:18]


@pytest.mark.parametrize(("update", "micro_step"), [(0, 0), (0, 2), (2, 1), (5, 0)])
def test_stream_from_a_micro_step_on_is_the_tail_of_the_run(update, micro_step):
    windows = _windows(4, steps=3)
    full = [rows.tolist() for rows in windows.stream((0,))]
    tail = [rows.tolist() for rows in windows.stream((0,), update, micro_step)]
    assert tail == full[3 * update + micro_step :]
    assert len(tail) == windows.num_micro_steps(update, micro_step)


def test_skipped_windows_are_not_made(monkeypatch):
    order = mock.Mock(side_effect=epoch_order)
    monkeypatch.setattr(windows_module, "epoch_order", order)
    windows = _windows(8, num_examples=1000, num_train_epochs=1_000_000)
    (rows,) = windows.stream(update=windows.num_updates - 1)
    order.assert_called_once_with(1000, 1, 999_999)
    assert rows.tolist() == epoch_order(1000, 1, 999_999)[-8:].tolist()


@pytest.mark.parametrize(
    ("num_examples", "epochs", "size", "expected"),
    [(8, 1, 4, 2), (9, 1, 4, 3), (7250, 3.0, 8, 2719), (10, 0.25, 1, 2), (3, 1, 100, 1)]
    + [(100, 0.29, 1, 29)],  # 28.999999999999996 in floating point
)
def test_number_of_micro_steps_drops_nothing(num_examples, epochs, size, expected):
    windows = make_windows(num_examples, epochs, Batches(size, 1, 1), 0)
    assert windows.num_micro_steps() == windows.num_updates == expected


_NO_EPOCHS = r"`--num_train_epochs` must be finite and reach one example\. Received: "
_SEED = "`seed` must be an integer, 0 <= .* Received: "


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        *(
            ({"num_train_epochs": n}, rf"{_NO_EPOCHS}{n} of 23 examples\. Use 3\.0")
            for n in (0, -1.0, 0.01, float("nan"), float("inf"))
        ),
        *(({"seed": n}, rf"{_SEED}{n}\.") for n in (-1, 2**64)),
    ],
)
def test_epochs_of_no_example_and_seeds_out_of_range_are_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        _windows(**options)


@pytest.mark.parametrize("tokens", [None, 64])
def test_a_run_that_is_trained_on_ends_a_window_where_the_shorter_one_ended(tokens):
    lengths = np.random.default_rng(0).integers(3, 17, 23)
    batches, data = Batches(8, 4, 1), (lengths, tokens)
    make = lambda epochs, *more: make_windows(23, epochs, batches, 1, *data, *more)
    short, long = make(1.5), make(3, [1, 1.5])
    whole = make(1)
    assert (whole.num_updates, make(1.5, [1]).num_updates) == (3, 5)
    assert long.num_updates == 3 + 2 + 5  # of 23, 11 and 35 examples
    stream = [long.examples(update).tolist() for update in range(10)]
    assert [len(rows) for rows in stream] == [8, 8, 7, 8, 3, 8, 8, 8, 8, 3]
    assert _flat(stream) == _flat(make(3).examples(i).tolist() for i in range(9))
    assert _flat(stream[:5]) == _flat(short.examples(i).tolist() for i in range(5))
    micro_steps = [len(long.shares(update)) for update in range(10)]
    assert long.micro_steps_by_update.tolist() == micro_steps
    for done in range(11):
        assert long.num_micro_steps(done) == sum(micro_steps[done:])
    assert long.num_micro_steps(4, 1) == sum(micro_steps[4:]) - 1


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        (np.full(640, 128), 32 * 128),  # no padding: as few micro-steps as possible
        (np.full(640, 1), 128),  # 64 examples of one token fit in one anyway
        # An example of 100 tokens would pad 63 others; apart, it costs a micro-step.
        (np.where(np.arange(640) % 64, 8, 100), 512),
    ],
)
def test_default_cut_has_the_least_padding_and_micro_steps(lengths, expected):
    windows = make_windows(640, 1, Batches(64, 2, 1), 1, lengths)
    cut = with_fastest_tokens(windows, 128)
    assert cut.tokens == expected

    def time(tokens):
        other = make_windows(640, 1, Batches(64, 2, 1), 1, lengths, tokens)
        steps = [s[0] for update in range(10) for s in other.shares(update)]
        padding = sum(sum(lengths[s].max() - lengths[s]) for s in steps)
        return padding / 8 + 80 * len(steps)

    assert time(expected) == min(time(128 * 2**power) for power in range(6))
