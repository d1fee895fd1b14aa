"""Batches of a mixture: exact resumption whatever the processes, changes of sources, refusals, validation by source."""

import dataclasses
import gzip
import json
import math

import numpy as np
import pytest

from trainer.config import LengthWeight, SourceConfig
from trainer.data import DataError, PackedSequences, ValidationSet, load_corpus
from trainer.data.batches import make_train_iterator
from trainer.data.validation_set import divide
from trainer.errors import TrainingFailed

T = 64


@pytest.fixture
def sources(tmp_path, rng, write_jsonl) -> tuple[SourceConfig, ...]:
    """Three sources of random letters in files of three formats: short, long, and few documents."""
    pytest.importorskip("zstandard", reason="reads .zst files")
    import zstandard

    def texts(count, longest):
        lengths = rng.integers(1, longest, count)
        return ["".join(map(chr, rng.integers(97, 123, length))) for length in lengths]

    write_jsonl(tmp_path / "a.jsonl", texts(60, 80), field="body")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    for number, text in enumerate(texts(30, 400)):
        (tmp_path / f"b{number}.txt.zst").write_bytes(zstandard.compress(text.encode()))
    write_jsonl(tmp_path / "c.jsonl", texts(6, 300))
    return (
        SourceConfig("a", (str(tmp_path / "a.jsonl.gz"),), "jsonl", "body", weight=0.5),
        SourceConfig("b", (str(tmp_path / "b*.txt.zst"),), weight=0.3, length_weights=(LengthWeight(200, 3.0),)),
        SourceConfig("c", (str(tmp_path / "c.jsonl"),), "jsonl", weight=0.2),
    )


@pytest.fixture
def load(data_config):
    """Loads sources as a corpus; `load.said`: the lines told of the last."""

    def load(sources, **fields):
        load.said = []
        config = dataclasses.replace(data_config(source="stdlib", **fields), sources=tuple(sources))
        return load_corpus(config, vocab_size=300, on_progress=load.said.append)

    return load


@pytest.fixture
def make(load, sources):
    """Iterators over the mixture, or over another corpus or other sources; closed when the test ends."""
    iterators, corpora = [], {}

    def make(sources=sources, corpus=None, **options):
        if corpus is None:
            corpus = corpora.setdefault(sources, None) or corpora.update({sources: load(sources)}) or corpora[sources]
        options = {"sequence_length": T, "batch_size": 4, "seed": 7, "num_prefetch_batches": 3, **options}
        iterators.append(make_train_iterator(corpus, sources=sources, **options))
        return iterators[-1]

    yield make
    for iterator in iterators:
        iterator.close()


def take(iterator, count) -> list[bytes]:
    """The sequences of the next batches, as bytes."""
    batches = [next(iterator).arrays for _ in range(count)]
    return [
        b"".join(batch[name][i].tobytes() for name in sorted(batch))
        for batch in batches
        for i in range(len(batch["tokens"]))
    ]


def test_each_source_is_read_in_its_own_form_and_described(load, sources):
    corpus = load(sources)
    assert list(corpus.sources) == ["a", "b", "c"]
    summary = corpus.summary()
    assert summary["source"] == "mixture"
    for split in ("train", "validation"):
        counts = [summary["sources"][name][split] for name in "abc"]
        assert summary[split] == {key: sum(each[key] for each in counts) for key in summary[split]}
    documents = [sum(each[split]["num_documents"] for split in each) for each in summary["sources"].values()]
    assert documents == [60, 30, 6]
    assert any(line.startswith("b: ") for line in load.said)
    shares = [0.5, 0.3, 0.2]
    counted = [np.zeros(300) for _ in range(3)]
    for counts, each in zip(counted, corpus.sources.values(), strict=True):
        for document, length in enumerate(each.train.num_targets.tolist()):
            np.add.at(counts, each.train.stream(document, 1, length + 1), 1)
    mixed = sum(share * counts / counts.sum() for share, counts in zip(shares, counted, strict=True))
    expected = -sum(p * math.log(p) for p in mixed if p)
    assert corpus.unigram_nats_per_token == pytest.approx(expected)


def test_batches_hold_the_documents_of_their_sources(make, load, sources):
    iterator = make()
    corpus = load(sources)
    streams = {name: set() for name in corpus.sources}
    for name, each in corpus.sources.items():
        for document, length in enumerate(each.train.num_targets.tolist()):
            streams[name].add(tuple(each.train.stream(document, 1, length + 1).tolist()))
    whole = set.union(*streams.values())
    num_whole = 0
    for _ in range(20):
        share = next(iterator)
        for row in range(4):
            arrays = {name: array[row] for name, array in share.arrays.items()}
            lengths = np.bincount(arrays["segment_ids"])[:0:-1]
            np.testing.assert_array_equal(share.document_lengths[row], lengths)
            ends = np.cumsum(lengths)
            pieces = [arrays["targets"][end - length : end].tolist() for end, length in zip(ends, lengths, strict=True)]
            num_whole += sum(tuple(piece) in whole for piece in pieces)
    assert num_whole > 20
    drawn = {name: each["share"] for name, each in iterator.mixture().items()}
    total = sum(each["num_tokens"] for each in iterator.mixture().values())
    assert drawn == pytest.approx({"a": 0.5, "b": 0.3, "c": 0.2}, abs=T / total)
    assert 0 <= iterator.padding_fraction < 1 / 128
    assert total == round(80 * T * (1 - iterator.padding_fraction))


def test_restoring_at_random_places_gives_the_same_remaining_stream(make, rng):
    places = sorted({0, *rng.integers(1, 120, 5).tolist()})
    original = make()
    states, sequences = {}, []
    for place in range(130):
        if place in places:
            states[place] = json.loads(json.dumps(original.get_state()))
        sequences += take(original, 1)
    for place, state in states.items():
        fresh = make(num_prefetch_batches=int(rng.integers(1, 9)))
        assert fresh.set_state(state) == []
        assert fresh.get_state() == state
        assert take(fresh, 9) == sequences[4 * place : 4 * place + 36]
        # Other processes, on another mesh, and other batches see the same sequences.
        some = sorted(rng.choice(4, int(rng.integers(1, 5)), replace=False).tolist())
        share = make(indices=some)
        share.set_state(state)
        assert share.fingerprint() == make_at(make, state).fingerprint()
        assert take(share, 3) == [sequences[4 * (place + batch) + row] for batch in range(3) for row in some]
        larger = make(batch_size=6)
        assert larger.set_state(state) == []
        assert take(larger, 2) == sequences[4 * place : 4 * place + 12]
    # Going back in a running iterator, with batches prepared ahead of the old place, is as exact.
    place = places[len(places) // 2]
    original.set_state(states[place])
    assert take(original, 5) == sequences[4 * place : 4 * place + 20]
    assert len(json.dumps(original.get_state())) < 4_000


def make_at(make, state, **options):
    iterator = make(**options)
    iterator.set_state(state)
    return iterator


def test_a_source_s_documents_that_changed_are_refused_or_begin_anew(make, load, sources, tmp_path, write_jsonl):
    original = make()
    take(original, 10)
    state = original.get_state()
    write_jsonl(tmp_path / "c.jsonl", ["other", "documents", "of c"])
    grown = load(sources)
    told = r"the documents of the sources c, or their split, have changed since.*--data\.allow-changed True"
    with pytest.raises(DataError, match=told):
        make(corpus=grown).set_state(state)
    changed = make(corpus=grown)
    [note] = changed.set_state(state, allow_changed=True)
    assert note == "the documents of 'c' are other ones than before: it begins at its first"
    before = original.mixture()
    take(changed, 10)
    drawn = {name: each["num_tokens"] - before[name]["num_tokens"] for name, each in changed.mixture().items()}
    assert abs(drawn["c"] - 0.2 * sum(drawn.values())) <= T, "it makes up for nothing"
    assert make(corpus=grown).set_state(changed.get_state()) == []
    with pytest.raises(DataError, match="seed=7 but this run has 8"):
        make(seed=8).set_state(state)


def test_sources_come_and_go_and_a_single_corpus_becomes_a_mixture(make, load, sources):
    original = make(sources[:2])
    take(original, 10)
    state = original.get_state()
    wider = make(sources)
    assert wider.set_state(state) == ["'c' is new in the mixture, and begins at its first document"]
    take(wider, 5)
    narrower = make(sources[1:], corpus=load(sources))
    assert narrower.set_state(wider.get_state()) == ["'a' is no longer drawn from, and keeps its place"]
    assert narrower.mixture()["a"] == wider.mixture()["a"] | {"share": pytest.approx(wider.mixture()["a"]["share"])}
    # From packed sequences of the same corpus to a mixture, and from the mixture to packed sequences of another.
    corpus = load(sources)
    packed = make_train_iterator(corpus, sequence_length=T, batch_size=4, seed=7, num_prefetch_batches=1)
    take(packed, 3)
    mixed = make(corpus=corpus)
    assert mixed.set_state(packed.get_state()) == ["the mixture begins with the first documents of its sources"]
    assert mixed.get_state()["position"] == 12
    assert take(mixed, 2) == take(make(), 2)
    packed.close()
    other = dataclasses.replace(corpus, fingerprint="e" * 64)
    packed = make_train_iterator(other, sequence_length=T, batch_size=4, seed=7, num_prefetch_batches=1)
    assert "(corpus changed)" in packed.set_state(mixed.get_state(), allow_changed=True)[0]
    assert [packed.get_state()[name] for name in ("position", "epoch", "read")] == [20, 0, []]
    packed.close()


@pytest.mark.parametrize("change", [{"mixture": 3}, {"mixture": {}}, {"mixture": {"sources": []}}, {"position": "x"}])
def test_a_state_that_is_none_is_told(make, change):
    iterator = make()
    take(iterator, 2)
    state = iterator.get_state()
    for spoilt in (state | change, {**state, "mixture": state["mixture"] | {"sources": {"a": {"epoch": -1}}}}):
        with pytest.raises(DataError, match="the checkpoint's data state can't be read"):
            iterator.set_state(spoilt)
    assert iterator.get_state() == state, "it stays where it was"
    far = state["mixture"]["sources"]["a"] | {"position": 10**6}
    spoilt = state | {"mixture": state["mixture"] | {"sources": {"a": far}}}
    with pytest.raises(DataError, match=r"can't be read .*past its"):
        iterator.set_state(spoilt)
    assert iterator.get_state() == state


def test_sources_that_are_used_up_end_the_run(make, sources):
    told = []
    iterator = make(
        tuple(dataclasses.replace(source, when_exhausted="stop") for source in sources), on_progress=told.append
    )
    with pytest.raises(TrainingFailed, match=r"all documents of data.sources \(a, b, c\) are used up after"):
        take(iterator, 1000)
    assert len(told) == 3
    assert iterator.get_state()["position"] > 0


def test_what_cannot_be_mixed_is_refused(load, sources, tmp_path):
    a, b, c = sources
    missing = dataclasses.replace(b, files=(str(tmp_path / "none*.txt"),))
    with pytest.raises(DataError, match=r"data.sources 'b': data.files: '.*none\*.txt' matches no file"):
        load([a, missing])
    with pytest.raises(DataError, match=r"data.sources 'a': .*no field 'text'; it has id, body"):
        load([dataclasses.replace(a, text_field="text"), b])
    np.arange(1, 200, dtype="<u2").tofile(tmp_path / "d.bin")
    ids = SourceConfig("d", (str(tmp_path / "d.bin"),), "bin")
    with pytest.raises(DataError, match=r"'a' has tokenizer byte and documents .*'d' has tokenizer pretokenized"):
        load([a, ids])
    only_long = dataclasses.replace(c, length_weights=(LengthWeight(0, 0.0), LengthWeight(5000, 1.0)))
    with pytest.raises(DataError, match=r"data.sources 'c': length_weights leave none of its \d training documents"):
        load([a, only_long])


def test_validation_measures_each_source_by_its_share(load, sources):
    corpus = load(sources, validation_fraction=0.5)
    said = []
    chosen = ValidationSet.choose(
        corpus, sequence_length=16, num_sequences=10, sources=sources, on_progress=said.append
    )
    filled = {name: len(PackedSequences(each.validation, 16)) for name, each in corpus.sources.items()}
    counts = {name: min(count, filled[name]) for name, count in (("a", 5), ("b", 3), ("c", 2))}
    assert chosen.sources == tuple(name for name, count in counts.items() for _ in range(count))
    assert len(said) == (sum(counts.values()) < 10)
    batches = chosen.batches(4)
    assert [batch.source for batch in batches] == [name for name in "abc" for _ in range(-(-counts[name] // 4))]
    for name, each in corpus.sources.items():
        own = {
            tuple(each.validation.stream(document, start + 1, min(start + 16, length) + 1).tolist())
            for document, length in enumerate(each.validation.num_targets.tolist())
            for start in range(0, length, 16)
        }
        pieces = [
            tuple(batch.arrays["targets"][row][batch.arrays["segment_ids"][row] == segment].tolist())
            for batch in batches
            if batch.source == name
            for row in range(4)
            for segment in range(1, batch.arrays["segment_ids"][row].max() + 1)
        ]
        assert pieces
        assert own.issuperset(pieces), "all of them are the source's own"
    said.clear()
    assert chosen.count_bytes(corpus.tokenizer) > 0
    few = ValidationSet.choose(corpus, sequence_length=16, num_sequences=1, sources=sources, on_progress=said.append)
    assert few.sources == ("a", "b", "c")
    assert said == [
        "validation takes 3 sequences of 16 tokens, at least one of each source, though evaluation.num_sequences=1"
    ]
    without_c = ValidationSet.choose(corpus, sequence_length=16, num_sequences=4, sources=sources[:2])
    assert set(without_c.sources) == {"a", "b"}


def test_counts_are_divided_by_weights():
    assert divide(8, [0.7, 0.2, 0.1, 0.0]) == [5, 2, 1, 0]  # as binary numbers, 0.7 is less than 7/10, and 0.2 more
    assert divide(8, [0.75, 0.2, 0.05]) == [6, 1, 1]
    assert divide(10, [1, 1, 1]) == [4, 3, 3]
    assert divide(1, [0.5, 0.5]) == [1, 1]
