"""The training stream resumes exactly, reshuffles, shards; the validation set stands still."""

import dataclasses
import json
from collections import defaultdict

import numpy as np
import pytest

from trainer.data import ByteTokenizer, DataError, PackedSequences, ValidationSet
from trainer.data.documents import Delimiters

T = 64


def _take(iterator, count):
    return [next(iterator).arrays for _ in range(count)]


def _rows(batches) -> list[bytes]:
    return [
        b"".join(batch[name][i].tobytes() for name in sorted(batch))
        for batch in batches
        for i in range(len(batch["tokens"]))
    ]


def test_batches_have_the_promised_arrays(make_iterator):
    batch = next(make_iterator()).arrays
    names = ("tokens", "targets", "segment_ids", "positions")
    expected = dict.fromkeys(names, ((4, T), np.int32)) | {"weights": ((4, T), np.float32)}
    assert {name: (array.shape, array.dtype) for name, array in batch.items()} == expected


def test_each_epoch_visits_every_sequence_once_in_an_order_of_its_own(make_iterator, corpus):
    sequences = PackedSequences(corpus.train, T)
    iterator = make_iterator(batch_size=1)
    assert iterator.padding_fraction == sequences.padding_fraction
    epochs = [_rows(_take(iterator, len(sequences))) for _ in range(3)]
    every = sorted(_rows([{name: array[None] for name, array in sequences[i].items()} for i in range(len(sequences))]))
    assert all(sorted(epoch) == every for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_seed_alone_sets_the_order(make_iterator, corpus):
    count, num_sequences = 40, len(PackedSequences(corpus.train, T))
    assert _rows(_take(make_iterator(), count)) == _rows(_take(make_iterator(num_prefetch_batches=1), count))
    neighbours = [make_iterator(seed=seed, batch_size=1) for seed in (0, 1)]
    epochs = [tuple(_rows(_take(each, num_sequences))) for each in neighbours for _ in range(3)]
    assert len(set(epochs)) == 6


def test_restoring_at_random_places_gives_the_same_remaining_stream(make_iterator, rng):
    places = sorted({0, *rng.integers(1, 60, 6).tolist()})
    original = make_iterator()
    states, batches = {}, []
    for place in range(70):
        if place in places:
            states[place] = json.loads(json.dumps(original.get_state()))
        batches += _take(original, 1)
    for place, state in states.items():
        fresh = make_iterator(num_prefetch_batches=int(rng.integers(1, 9)))
        fresh.set_state(state)
        assert fresh.get_state() == state
        assert state["tokenizer"] == "byte"
        assert _rows(_take(fresh, 70 - place)) == _rows(batches[place:])
    # Going back in a running iterator, with batches prepared ahead of the old place, is as exact.
    place = places[len(places) // 2]
    original.set_state(states[place])
    assert _rows(_take(original, 5)) == _rows(batches[place : place + 5])


def test_restoring_far_into_the_stream_replays_nothing(make_iterator, monkeypatch):
    built = []
    build = PackedSequences.__getitem__
    monkeypatch.setattr(PackedSequences, "__getitem__", lambda self, index: built.append(index) or build(self, index))
    iterator = make_iterator()
    state = iterator.get_state()
    state["epoch"] = 10**9
    iterator.set_state(state)
    next(iterator)
    iterator.close()
    assert 1 <= len(built) <= 4 * (1 + 2 * 3)


def test_state_is_small(make_iterator):
    iterator = make_iterator()
    _take(iterator, 30)
    assert len(json.dumps(iterator.get_state())) < 500


def test_the_order_of_another_seed_is_refused(make_iterator):
    state = make_iterator().get_state()
    with pytest.raises(DataError, match=r"saved data state has seed=7 but this run has 8.*go back to the seed"):
        make_iterator(seed=8).set_state(state)


def test_batches_of_another_size_go_on_with_the_next_sequence(make_iterator, rng):
    rows = _rows(_take(make_iterator(batch_size=1), 100))
    original = make_iterator(batch_size=5)
    _take(original, int(rng.integers(1, 9)))
    state, position = original.get_state(), original.get_state()["position"]
    for batch_size in (2, 3, 5):
        changed = make_iterator(batch_size=batch_size)
        assert changed.set_state(state) == []
        assert changed.get_state() == state
        assert _rows(_take(changed, 4)) == rows[position : position + 4 * batch_size]
        state, position = changed.get_state(), position + 4 * batch_size
    for some in ((0, 3), (1, 2)):
        share = make_iterator(batch_size=4, indices=some)
        share.set_state(state)
        assert _rows(_take(share, 1)) == [rows[position + row] for row in some]


def test_other_documents_begin_an_epoch_if_that_is_asked_for(make_iterator, corpus):
    state = make_iterator().get_state()
    grown = dataclasses.replace(corpus, fingerprint="e" * 64)
    with pytest.raises(DataError, match=r"has corpus='ffff.* but this run has 'eeee.*--data\.allow-changed True"):
        make_iterator(grown).set_state(state)
    iterator = make_iterator(grown)
    notes = iterator.set_state(state, allow_changed=True)
    assert len(notes) == 2
    assert "(corpus changed): an epoch begins with them" in notes[0]
    assert "the validation documents may be other ones" in notes[1]
    again = make_iterator(grown)
    assert again.set_state(iterator.get_state()) == [], "the new documents are the run's own from then on"


def test_other_delimiters_are_refused_by_name(make_iterator, corpus):
    state = make_iterator().get_state()
    assert state["delimiters"] == [256, 256]
    begun = dataclasses.replace(corpus, fingerprint="e" * 64, tokenizer=ByteTokenizer(Delimiters(None, 256)))
    earlier = {name: value for name, value in state.items() if name != "delimiters"}
    for each in (state, earlier, state | {"delimiters": "x" * 999}):
        told = r"documents begin and end with tokens .*, and this run's with \[None, 256\]; set data.begin"
        with pytest.raises(DataError, match=told) as refused:
            make_iterator(begun).set_state(each)
        assert len(str(refused.value)) < 500
    assert make_iterator(begun).set_state(state, allow_changed=True)


def test_another_tokenizers_documents_are_refused_whatever_is_allowed(make_iterator, corpus):
    state = make_iterator().get_state() | {"tokenizer": "tokenizers 1 abc"}
    grown = dataclasses.replace(corpus, fingerprint="e" * 64)
    with pytest.raises(DataError, match=r"made by tokenizer 'tokenizers 1 abc', and this run's by 'byte'"):
        make_iterator(grown).set_state(state, allow_changed=True)
    make_iterator().set_state(state)  # the same tokens: only the library's version can differ


@pytest.mark.parametrize(
    "change",
    [{"position": value} for value in (-1, 2**63, 10**30, 1.5, True, None, "7", [], {}, float("nan"))]
    + [{"epoch": value} for value in (-1, 10**30, 0.5, True, None, "1")]
    + [{"read": value} for value in (None, 3, [3], [[T]], [[T, 0]], [[T, 10**6]], [[32, 10**6]], [[0, 1]], [["64", 1]])]
    + [{"stream": value} for value in (None, [], "x", 3)],
)
def test_a_state_that_is_none_is_told(make_iterator, change):
    iterator = make_iterator()
    state = iterator.get_state()
    with pytest.raises(DataError, match="the checkpoint's data state can't be read"):
        iterator.set_state(state | change)
    lacking = ({key: state[key] for key in state if key != name} for name in state.keys() - {"delimiters"})
    for whole in (None, [], 3, "x", {}, *lacking):
        with pytest.raises(DataError, match="the checkpoint's data state can't be read"):
            iterator.set_state(whole)
    assert iterator.get_state() == state, "it stays where it was"


def test_each_process_reads_its_rows_of_the_batch_that_one_process_reads_whole(make_iterator, corpus, rng, monkeypatch):
    whole = make_iterator(batch_size=6)
    rows_of = [sorted(rng.choice(6, rng.integers(1, 7), replace=False).tolist()) for _ in range(3)]
    processes = [make_iterator(batch_size=6, indices=rows) for rows in rows_of]
    fingerprints = {process.fingerprint() for process in processes}
    for _ in range(30):
        batch = next(whole)
        rows = _rows([batch.arrays])
        for mine, process in zip(rows_of, processes, strict=True):
            share = next(process)
            assert (share.indices, share.batch_size) == (tuple(mine), 6)
            assert _rows([share.arrays]) == [rows[row] for row in mine]
            # All processes know of all documents.
            lengths = (share.document_lengths, batch.document_lengths, batch.arrays["segment_ids"])
            for ours, theirs, ids in zip(*lengths, strict=True):
                np.testing.assert_array_equal(ours, theirs)
                np.testing.assert_array_equal(ours, np.bincount(ids)[:0:-1])  # ids fall to the padding's 0
    assert all(process.get_state() == whole.get_state() for process in processes)
    moved = {process.fingerprint() for process in [*processes, whole]}
    other_documents = dataclasses.replace(corpus, fingerprint="e" * 64)
    others = [make_iterator(other_documents, batch_size=6), make_iterator(seed=8, batch_size=6), make_iterator()]
    assert [len(fingerprints), len(moved)] == [1, 1]
    assert len({*fingerprints, *moved, *(other.fingerprint() for other in others)}) == 5


def test_a_process_reads_no_tokens_but_its_own(corpus, make_iterator, monkeypatch):
    # By stream: one that was read from reads on for a moment, and so may one of the test before.
    read, made, build, make = defaultdict(list), [], PackedSequences.__getitem__, PackedSequences.__init__
    monkeypatch.setattr(
        PackedSequences, "__init__", lambda self, *given, **named: made.append(self) or make(self, *given, **named)
    )
    monkeypatch.setattr(
        PackedSequences, "__getitem__", lambda self, index: read[self].append(index) or build(self, index)
    )
    _take(make_iterator(batch_size=1, num_prefetch_batches=1), 30)
    _take(make_iterator(batch_size=6, indices=[1, 4], num_prefetch_batches=1), 5)
    ValidationSet.choose(corpus, sequence_length=T, num_sequences=8).batches(4, indices=[1])
    every, mine, validation = (read[stream] for stream in made if stream in read)
    assert mine[:10] == [every[6 * batch + row] for batch in range(5) for row in (1, 4)]
    assert len(validation) == 2


def test_a_negative_seed_is_refused(make_iterator):
    with pytest.raises(ValueError, match=r"seed=-1 must not be negative"):
        make_iterator(seed=-1)


@pytest.mark.parametrize("batch_size", [4, 7])
@pytest.mark.parametrize("num_sequences", [1, 2, 3])
def test_one_small_document_fills_batches_over_several_epochs(
    make_iterator, corpus, make_documents, rng, batch_size, num_sequences
):
    document = rng.integers(0, 256, T * num_sequences - 9).tolist()
    small = dataclasses.replace(corpus, train=make_documents([document]))
    stream = [*document, 256]  # the targets
    whole = [stream[start : start + T] for start in range(0, len(stream), T)]

    def targets(batch):
        pairs = zip(batch["targets"], batch["weights"], strict=True)
        return [row[weights != 0].tolist() for row, weights in pairs]

    told, num_batches = [], 6
    original = make_iterator(small, batch_size=batch_size, on_progress=told.append)
    [line] = told
    assert line.startswith(f"training fills {num_sequences} of the {batch_size} sequences of {T} tokens")
    assert line.endswith("they repeat within a batch")
    states, batches = [], []
    for _ in range(num_batches):
        states.append(json.loads(json.dumps(original.get_state())))
        batches += _take(original, 1)
    rows = [row for batch in batches for row in targets(batch)]
    for start in range(0, len(rows) - num_sequences + 1, num_sequences):
        assert sorted(rows[start : start + num_sequences]) == sorted(whole), "each epoch has every sequence once"
    for place, state in enumerate(states):
        assert state["position"] == place * batch_size
        resumed = make_iterator(small, batch_size=batch_size, num_prefetch_batches=1)
        assert resumed.set_state(state) == []
        assert _rows(_take(resumed, num_batches - place)) == _rows(batches[place:])
    singly = make_iterator(small, batch_size=1)
    singly.set_state(states[1])
    assert _rows(_take(singly, batch_size)) == _rows(batches[1:2]), "the place doesn't depend on the batch size"


def test_documents_that_fill_a_batch_are_not_told(make_iterator, corpus):
    told = []
    make_iterator(batch_size=len(PackedSequences(corpus.train, T)), on_progress=told.append)
    assert told == []


@pytest.mark.parametrize("batch_size", [1, 3, 4])
def test_validation_batches_are_fixed_and_exactly_as_many_as_asked(corpus, batch_size):
    def make(**options):
        chosen = ValidationSet.choose(corpus, sequence_length=T, num_sequences=8)
        return [share.arrays for share in chosen.batches(batch_size, **options)]

    batches = make()
    assert _rows(batches) == _rows(make())
    assert {batch["tokens"].shape for batch in batches} == {(batch_size, T)}
    rows = np.concatenate([batch["weights"] for batch in batches])
    assert len(rows) == -(-8 // batch_size) * batch_size
    assert rows[:8].any(axis=1).all()
    assert not rows[8:].any()
    assert len(set(_rows(batches)[:8])) == 8
    assert not np.concatenate([batch["segment_ids"] for batch in batches])[8:].any()
    for row in range(batch_size):
        assert _rows(make(indices=[row])) == _rows(batches)[row::batch_size]


def test_validation_can_use_every_sequence_and_no_more(corpus):
    num_sequences = len(PackedSequences(corpus.validation, T))

    def make(num_sequences, **options):
        chosen = ValidationSet.choose(corpus, sequence_length=T, num_sequences=num_sequences, **options)
        return [share.arrays for share in chosen.batches(1)]

    batches = make(num_sequences)
    assert sum(int(batch["weights"].sum()) for batch in batches) == corpus.validation.num_tokens
    told = []
    assert _rows(make(num_sequences + 1, on_progress=told.append)) == _rows(batches)
    [line] = told
    assert line.startswith(f"validation fills {num_sequences} of the {num_sequences + 1} sequences of {T} tokens")


@pytest.mark.parametrize("begin", [None, 256])
@pytest.mark.parametrize("end", [None, 256])
@pytest.mark.parametrize("is_known", [True, False])
def test_bytes_of_the_targets_are_counted_whatever_stands_around_documents(rng, make_documents, begin, end, is_known):
    documents = make_documents([rng.integers(0, 256, length) for length in (1, 5, 63, 64, 65, 200)])
    documents = dataclasses.replace(documents, delimiters=Delimiters(begin, end))
    documents.table["num_bytes"] = documents.table["length"] if is_known else -1
    validation = ValidationSet(PackedSequences(documents, T), tuple(range(len(PackedSequences(documents, T)))))
    batches = validation.batches(4)
    targets = np.concatenate([batch.arrays["targets"][batch.arrays["weights"] != 0] for batch in batches])
    assert len(targets) == documents.num_tokens
    assert validation.count_bytes(ByteTokenizer()) == (targets < 256).sum()


def test_a_batch_tells_the_documents_of_its_segments(make_iterator, corpus, rng):
    before, after = make_iterator(), make_iterator(sequence_length=96)
    before.skip(int(rng.integers(1, 12)))
    after.set_state(before.get_state())
    for _ in range(30):
        batch = next(after)
        for row, documents in enumerate(batch.documents):
            segments, targets = (batch.arrays[name][row] for name in ("segment_ids", "targets"))
            assert len(documents) == segments.max()
            for place, document in enumerate(documents.tolist()):
                piece = targets[segments == len(documents) - place].tobytes()
                stream = corpus.train.stream(document, 1, int(corpus.train.num_targets[document]) + 1)
                assert piece in stream.tobytes()


def test_skipped_batches_are_those_that_would_come(make_iterator, rng):
    count = int(rng.integers(1, 60))
    ours, theirs = make_iterator(), make_iterator()
    for each in (ours, theirs):
        next(each)
    ours.skip(count)
    for _ in range(count):
        next(theirs)
    assert ours.get_state() == theirs.get_state()
    np.testing.assert_array_equal(next(ours).arrays["tokens"], next(theirs).arrays["tokens"])
