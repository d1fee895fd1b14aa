"""A change of the sequence length within an epoch: nothing that was read whole comes again, and no scraps are left."""

import dataclasses
import itertools
import json
from collections import Counter, defaultdict

import numpy as np
import pytest

from trainer.data import PackedSequences
from trainer.data.documents import Delimiters

END = 2**16 - 1


@pytest.fixture
def documents(rng) -> list[list[int]]:
    """Token lists in which no token comes twice."""
    tokens = rng.permutation(END)
    ends = np.cumsum(rng.integers(1, 300, 60))
    return [part.tolist() for part in np.split(tokens[: ends[-1]], ends[:-1])]


@pytest.fixture
def make(make_iterator, corpus, make_documents, documents):
    """Iterators over these documents, by default of one sequence a batch."""
    train = dataclasses.replace(make_documents(documents), delimiters=Delimiters(END, END))

    def make(sequence_length, documents=train, state=None, **options):
        options = {"batch_size": 1, "num_prefetch_batches": 1} | options
        iterator = make_iterator(
            dataclasses.replace(corpus, train=documents), sequence_length=sequence_length, **options
        )
        iterator.told = [] if state is None else iterator.set_state(json.loads(json.dumps(state)))
        return iterator

    return make


def targets_of(arrays) -> list[tuple[int, int]]:
    """The targets of a batch, each with the token before it: together, they come once in all documents."""
    mask = arrays["weights"] != 0
    return list(zip(arrays["tokens"][mask].tolist(), arrays["targets"][mask].tolist(), strict=True))


def read(iterator, count=None) -> Counter:
    """The targets of some sequences; by default those up to the end of the epoch."""
    epoch, targets, num_read = iterator.get_state()["epoch"], Counter(), 0
    while iterator.get_state()["epoch"] == epoch if count is None else num_read < count:
        targets.update(targets_of(next(iterator).arrays))
        num_read += 1
    return targets


def shares(documents, targets: Counter) -> list[float]:
    """The share of each document's targets that is among some targets."""
    streams = [[END, *tokens, END] for tokens in documents]
    return [float(np.mean([targets[pair] for pair in itertools.pairwise(stream)])) for stream in streams]


@pytest.mark.parametrize("lengths", [(16, 64), (64, 16), (50, 400, 130)])
def test_documents_that_are_left_of_an_epoch_come_whole_and_once(make, documents, rng, lengths):
    iterator = make(lengths[0])
    read(iterator)  # the first epoch
    left = np.ones(len(documents), bool)
    for before, length in itertools.pairwise(lengths):
        targets = read(iterator, int(rng.integers(1, 2000 // before)))
        of_read = np.array(shares(documents, targets))
        assert set(of_read[~left]) <= {0.0}
        iterator = make(length, state=iterator.get_state())
        [line] = iterator.told
        rest = np.array(shares(documents, read(make(length, state=iterator.get_state()))))
        assert set(rest) <= {0.0, 1.0}, "no document is left in part"
        assert f"epoch 2 goes on with {int((rest == 1).sum())} of its 60 documents, those that are left" in line
        np.testing.assert_array_equal(rest[of_read == 1], 0)
        np.testing.assert_array_equal(rest[left & (of_read == 0)], 1)
        in_part = (of_read > 0) & (of_read < 1)
        num_left_out = int((in_part & (rest == 0)).sum())
        assert abs(num_left_out - of_read[in_part].sum()) <= 0.5 + 1e-9
        left = rest == 1
    read(iterator)
    every = read(iterator)
    assert set(shares(documents, every)) == {1.0}, "the next epoch has all documents"
    assert set(every.values()) == {1}


def test_places_behind_a_change_are_exact(make, documents, make_documents, rng):
    iterator = make(16, batch_size=3)
    read(iterator, 11)
    iterator = make(64, batch_size=2, state=iterator.get_state())
    read(iterator, 4)
    iterator = make(40, batch_size=2, state=iterator.get_state())
    whole = len(PackedSequences(make_documents(documents), 40))
    states, batches = [], []
    for _ in range(whole):  # past the epoch's end and the next one's
        states.append(iterator.get_state())
        batches.append(targets_of(next(iterator).arrays))
    assert {state["epoch"] for state in states} >= {0, 1, 2}
    assert [state["position"] for state in states] == [33 + 8 + 2 * number for number in range(whole)]
    for place in (0, *rng.integers(1, whole - 3, 5).tolist()):
        again = make(40, batch_size=2, num_prefetch_batches=int(rng.integers(1, 5)), state=states[place])
        assert again.told == []
        assert again.get_state() == states[place]
        assert [targets_of(next(again).arrays) for _ in range(3)] == batches[place : place + 3]
        singly = make(40, state=states[place])
        assert [each for _ in range(2) for each in targets_of(next(singly).arrays)] == batches[place]
        shares = [make(40, batch_size=2, indices=[row], state=states[place]) for row in range(2)]
        assert shares[0].fingerprint() == shares[1].fingerprint()
        assert [each for share in shares for each in targets_of(next(share).arrays)] == batches[place]


def test_a_length_that_nothing_was_read_at_leaves_no_trace(make):
    iterator = make(16)
    read(iterator, 20)
    state = iterator.get_state()
    elsewhere = make(64, state=state).get_state()
    back = make(16, state=elsewhere)
    assert back.get_state() == state
    assert read(back, 30) == read(iterator, 30)


@pytest.mark.parametrize(("num_read", "is_left_out"), [(1, False), (3, True)])
def test_an_epoch_of_one_document_is_begun_anew_or_over(make, make_documents, num_read, is_left_out):
    document = list(range(63))
    one = dataclasses.replace(make_documents([document]), delimiters=Delimiters(None, END))
    iterator = make(16, one)  # four sequences
    read(iterator, num_read)
    changed = make(32, one, state=iterator.get_state())
    assert f"epoch 1 goes on with {1 - is_left_out} of its 1 documents" in changed.told[0]
    assert changed.get_state()["epoch"] == is_left_out
    assert len(read(changed, 2)) == 63
    assert changed.get_state()["epoch"] == 1 + is_left_out


def test_documents_of_a_length_class_are_left_in_their_share(make, make_documents, rng):
    """Half an epoch at a short length leaves half of the long documents, wherever they lie among the others."""
    lengths = np.where(rng.random(300) < 0.3, 150, 10)
    ends = np.cumsum(lengths)
    documents = [list(range(end - length, end)) for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)]
    train = dataclasses.replace(make_documents(documents), delimiters=Delimiters(END, END))
    iterator = make(16, train)
    read(iterator, len(PackedSequences(train, 16)) // 2)
    rest = np.array(shares(documents, read(make(256, train, state=iterator.get_state()))))
    by_length = defaultdict(list)
    for length, share in zip(lengths.tolist(), rest, strict=True):
        by_length[length].append(share)
    for length, each in by_length.items():
        assert np.mean(each) == pytest.approx(0.5, abs=0.2), length
