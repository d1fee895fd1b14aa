"""Packing: every target once, nothing cut that fits, ids and positions that agree, little padding."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.documents import DOCUMENT_DTYPE, Delimiters, Documents
from trainer.data.packing import PackedSequences, cut_documents, pack_best_fit
from trainer.data.unigram import estimate_unigram_entropy

END = 1000


def _documents(lengths: list[int], rng: np.random.Generator) -> Documents:
    """Random tokens, spread over two arrays."""
    arrays = tuple(rng.integers(0, END, sum(lengths[i::2]), dtype=np.uint16) for i in range(2))
    table = np.zeros(len(lengths), DOCUMENT_DTYPE)
    for i in range(2):
        mine = table[i::2]
        mine["array"], mine["length"] = i, lengths[i::2]
        mine["start"] = np.cumsum(mine["length"]) - mine["length"]
    return Documents(arrays, table, Delimiters(END, END))


def _segments(row: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    ids = row["segment_ids"]
    return [{name: array[ids == i] for name, array in row.items()} for i in range(1, ids.max() + 1)]


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=40),
    sequence_length=st.integers(1, 40),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_target_is_predicted_exactly_once(lengths, sequence_length, seed):
    documents = _documents(lengths, np.random.default_rng(seed))
    sequences = PackedSequences(documents, sequence_length)

    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for row in (sequences[i] for i in range(len(sequences))):
        for name, array in row.items():
            assert array.shape == (sequence_length,), name
            assert array.dtype == (np.float32 if name == "weights" else np.int32), name
        # Padding comes last, and weights, segment ids and content tell the same story about it.
        num_targets = int(row["weights"].sum())
        assert num_targets > 0
        assert (row["weights"][:num_targets] == 1).all()
        assert (row["segment_ids"][:num_targets] > 0).all()
        assert all((array[num_targets:] == 0).all() for array in row.values())
        assert set(np.diff(row["segment_ids"][:num_targets])) <= {0, -1}
        assert row["segment_ids"][num_targets - 1] == 1
        for segment in _segments(row):
            np.testing.assert_array_equal(segment["positions"], np.arange(len(segment["positions"])))
            found.append((tuple(segment["tokens"].tolist()), tuple(segment["targets"].tolist())))

    expected = []
    for document in range(len(documents)):
        stream = [END, *documents.tokens(document).tolist(), END]
        inputs, targets = stream[:-1], stream[1:]
        # A document that fits is one piece; a longer one is full sequences and a remainder.
        for start in range(0, len(targets), sequence_length):
            expected.append(
                (tuple(inputs[start : start + sequence_length]), tuple(targets[start : start + sequence_length]))
            )
    assert sorted(found) == sorted(expected)


def _best_fit_decreasing(lengths: np.ndarray, capacity: int) -> list[int]:
    """The textbook algorithm, piece by piece: the rooms left in its sequences."""
    rooms: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= length]
        if not fitting:
            rooms.append(capacity)
            fitting = [len(rooms) - 1]
        rooms[min(fitting, key=rooms.__getitem__)] -= length
    return sorted(rooms)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 50).flatmap(lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c), min_size=1, max_size=60)))
)
def test_packing_is_best_fit_decreasing(case):
    capacity, lengths = case[0], np.array(case[1])
    sequence_of = pack_best_fit(lengths, capacity)
    assert set(sequence_of) == set(range(sequence_of.max() + 1))
    rooms = capacity - np.bincount(sequence_of, weights=lengths)
    assert sorted(rooms.astype(int).tolist()) == _best_fit_decreasing(lengths, capacity)


def test_padding_is_under_one_percent_of_many_documents(rng, make_documents):
    lengths = np.clip(rng.lognormal(5, 1, 3000), 1, 2000).astype(int)
    sequences = PackedSequences(make_documents([np.zeros(n) for n in lengths]), sequence_length=1024)
    assert 0 <= sequences.padding_fraction < 0.01
    num_targets = sum(int(sequences[i]["weights"].sum()) for i in range(len(sequences)))
    assert sequences.padding_fraction == pytest.approx(1 - num_targets / (1024 * len(sequences)))


def test_a_million_documents_are_packed_in_seconds(rng):
    lengths = np.clip(rng.lognormal(6, 1.2, 1_000_000), 1, 100_000).astype(np.int64)
    pieces = cut_documents(lengths, 32_768)
    sequence_of = pack_best_fit(pieces.length, 32_768)
    filled = np.bincount(sequence_of, weights=pieces.length)
    assert filled.max() <= 32_768
    assert filled.sum() == lengths.sum()
    assert len(filled) <= 1.001 * lengths.sum() / 32_768 + 1


@pytest.mark.parametrize("begin", [None, 7, 9])
@pytest.mark.parametrize("end", [None, 9])
def test_documents_stand_between_their_delimiters(rng, begin, end):
    contents = [rng.integers(10, 99, length) for length in (1, 2, 5, 40, 3)]
    table = np.zeros(len(contents), DOCUMENT_DTYPE)
    table["length"] = [len(content) for content in contents]
    table["start"] = np.cumsum(table["length"]) - table["length"]
    documents = Documents((np.concatenate(contents),), table, Delimiters(begin, end))
    around = [[] if token is None else [token] for token in (begin, end)]
    streams = [[*around[0], *content.tolist(), *around[1]] for content in contents]
    assert [documents.stream(i, 0, len(stream)).tolist() for i, stream in enumerate(streams)] == streams
    assert documents.num_targets.tolist() == [len(stream) - 1 for stream in streams]
    assert documents.num_tokens == sum(len(stream) - 1 for stream in streams)
    pairs = Counter(pair for stream in streams for pair in itertools.pairwise(stream))
    sequences = PackedSequences(documents, 16)
    packed = Counter()
    for sequence in (sequences[index] for index in range(len(sequences))):
        mask = sequence["weights"] == 1
        packed.update(zip(sequence["tokens"][mask].tolist(), sequence["targets"][mask].tolist(), strict=True))
    assert packed == pairs
    counts = np.bincount([target for stream in streams for target in stream[1:]])
    shares = counts[counts > 0] / counts.sum()
    estimate = estimate_unigram_entropy(documents, 100)
    assert estimate.nats_per_token == pytest.approx(-(shares * np.log(shares)).sum())
    assert estimate.num_tokens == counts.sum()
