"""Mixtures: exact shares after every sequence, each document once an epoch, places that go on to the bit."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config import LengthWeight, SourceConfig
from trainer.data import mixture as mixture_module
from trainer.data.mixture import Mixture, MixturePlace
from trainer.errors import DataError, TrainingFailed

T = 64


def source(name: str, weight: float = 1.0, **fields) -> SourceConfig:
    return SourceConfig(name, ("unused",), weight=weight, **fields)


def copy(place: MixturePlace) -> MixturePlace:
    """As a checkpoint brings it back."""
    return MixturePlace.from_json(json.loads(json.dumps(place.to_json())))


@st.composite
def drawn_sources(draw):
    """Sources of random weights whose documents' lengths are random, each source's of its own size."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count, sequence_length = draw(st.integers(1, 9)), draw(st.sampled_from([1, 5, 64, 1000]))
    whole = draw(st.booleans())
    num_targets = {}
    for index in range(count):
        lengths = rng.lognormal(
            np.log(sequence_length) * rng.uniform(0.2, 1.2), rng.uniform(0, 1.5), rng.integers(1, 90)
        )
        lengths = np.maximum(lengths, 1).astype(np.int64)
        # Documents that each fill a sequence make the hardest rounds of turns.
        num_targets[f"s{index}"] = np.full_like(lengths, sequence_length) if whole else lengths
    weights = rng.dirichlet(np.full(count, draw(st.sampled_from([0.2, 1.0, 20.0])))) + 1e-3
    sources = [source(name, float(weight)) for name, weight in zip(num_targets, weights, strict=True)]
    return sources, num_targets, sequence_length


@settings(max_examples=60, deadline=None)
@given(drawn=drawn_sources(), seed=st.integers(0, 2**40))
def test_after_any_number_of_sequences_each_source_has_its_share_and_each_document_its_turn(drawn, seed):
    sources, num_targets, sequence_length = drawn
    mixture = Mixture(sources, num_targets, sequence_length=sequence_length, seed=seed)
    total_weight = sum(each.weight for each in sources)
    firsts = dict(zip(num_targets, np.cumsum([0, *map(len, num_targets.values())]), strict=False))
    all_targets = np.concatenate(list(num_targets.values()))
    seen, begun = np.zeros(len(all_targets), np.int64), np.zeros(len(all_targets), np.int64)
    for number in range(1, 150):
        pieces = mixture.plan_sequence()
        filled = sum(piece.length for piece in pieces)
        assert sequence_length - sequence_length // 128 <= filled <= sequence_length
        for document, start, length in pieces:
            begun[document] += start == 0
            assert start == seen[document] - (begun[document] - 1) * all_targets[document], "pieces follow each other"
            seen[document] += length
        place = mixture.place()
        assert place.num_sequences == number
        drawn_tokens = {name: each.num_tokens for name, each in place.sources.items()}
        total = sum(drawn_tokens.values())
        assert total + place.num_padding == number * sequence_length
        for each in sources:
            share = each.weight / total_weight * total
            assert abs(drawn_tokens[each.name] - share) <= sequence_length * (1 + 1e-9), each.name
    for name, first in firsts.items():
        epoch, counts = place.sources[name].epoch, begun[first : first + len(num_targets[name])]
        assert set(counts) <= {epoch, epoch + 1}, "an epoch begins when every document of the one before has come"


def test_documents_that_fit_well_don_t_push_a_source_off_its_share():
    # Documents of "a" never fit what is left of a sequence, and one of each other source always would.
    others = [f"o{index}" for index in range(20)]
    num_targets = {"a": np.full(500, 60)} | {name: np.full(50, 40) for name in others}
    sources = [source("a", 0.9), *(source(name, 0.1 / len(others)) for name in others)]
    mixture = Mixture(sources, num_targets, sequence_length=100, seed=0)
    for _ in range(100):
        mixture.plan_sequence()
        place = mixture.place()
        total = sum(each.num_tokens for each in place.sources.values())
        assert abs(place.sources["a"].num_tokens - 0.9 * total) <= 100


@settings(max_examples=40, deadline=None)
@given(drawn=drawn_sources(), data=st.data())
def test_a_place_goes_on_to_the_bit(drawn, data):
    sources, num_targets, sequence_length = drawn
    at = data.draw(st.integers(0, 40))
    options = {"sequence_length": sequence_length, "seed": 3}
    original = Mixture(sources, num_targets, **options)
    for _ in range(at):
        original.plan_sequence()
    place = copy(original.place())
    assert place == original.place()
    resumed = Mixture(sources, num_targets, **options, place=place)
    assert resumed.place() == place
    for _ in range(30):
        assert resumed.plan_sequence() == original.plan_sequence()
        assert resumed.place() == original.place()


def plan(mixture: Mixture, count: int) -> list:
    return [mixture.plan_sequence() for _ in range(count)]


def test_the_order_follows_from_the_seed_the_name_and_the_epoch_alone():
    num_targets = {name: np.full(200, T) for name in ("a", "b")}

    def order(name, seed=0, epochs=1, others=()):
        sources = [source(name), *map(source, others)]
        mixture = Mixture(sources, num_targets, sequence_length=T, seed=seed)
        first = 0 if name == "a" else 200
        pieces = [piece for pieces in plan(mixture, 200 * epochs * len(sources)) for piece in pieces]
        return [document - first for document, _, _ in pieces if first <= document < first + 200]

    orders = [order("a"), order("a", epochs=2)[200:], order("b"), order("a", seed=1)]
    assert all(sorted(each) == list(range(200)) for each in orders)
    assert len({tuple(each) for each in orders}) == 4
    assert order("a", others="b") == order("a")
    # It is the same one with every version of Python and NumPy, or runs wouldn't resume exactly.
    assert orders[0][:8] == [105, 63, 27, 149, 142, 132, 73, 10]


def test_documents_are_drawn_by_the_weights_of_their_lengths():
    lengths = np.array([*[10] * 20, *[30] * 40, *[50] * 8, *[200] * 12])
    weights = (LengthWeight(20, 0.25), LengthWeight(40, 0.0), LengthWeight(100, 2.0))
    mixture = Mixture([source("a", length_weights=weights)], {"a": lengths}, sequence_length=T, seed=5)
    begun = Counter()
    while mixture.place().sources["a"].epoch < 8:
        begun.update(int(lengths[piece.document]) for piece in mixture.plan_sequence() if piece.start == 0)
    # In eight epochs: documents of weight 2 eight times, of weight 1 four times, of weight 1/4 once.
    expected = {200: 12 * 8, 10: 20 * 4, 30: 40}
    assert begun.keys() == expected.keys()
    assert all(expected[length] <= begun[length] <= expected[length] + 64 for length in expected)
    counts = mixture.place().sources["a"].tokens_by_length
    assert counts[0] > 0
    assert not any(counts[1:])


def test_weights_that_leave_no_document_are_refused():
    only_long = source("a", length_weights=(LengthWeight(0, 0.0), LengthWeight(91, 1.0)))
    told = r"data.sources 'a': length_weights leave none of its 3 training documents, the longest of 90 tokens; give"
    with pytest.raises(DataError, match=told):
        Mixture([only_long], {"a": np.array([1, 90, 3])}, sequence_length=T, seed=0)


@pytest.mark.parametrize("lengths", [[10, 64, 200, 3, 90], [64] * 5])
def test_a_source_that_stops_gives_its_weight_to_the_others(lengths):
    told = []
    num_targets = {"a": np.array(lengths), "b": np.full(7, 40), "c": np.full(900, 33)}
    sources = [source("a", 4.0, when_exhausted="stop"), source("b"), source("c", 3.0)]
    mixture = Mixture(sources, num_targets, sequence_length=T, seed=1, on_progress=told.append)
    pieces = [piece for sequence in plan(mixture, 150) for piece in sequence]
    of_a = Counter()
    for piece in pieces:
        of_a[piece.document] += piece.length * (piece.document < 5)
    assert [of_a[document] for document in range(5)] == lengths, "each document comes once"
    assert [line.split(" at ")[0] for line in told] == [
        "data.sources: 'a' has run dry",
        "data.sources: 'b' has run dry",
    ]
    assert told[0].endswith("its weight goes to the others")
    assert told[1].endswith("its documents come again, in another order")
    place = mixture.place()
    assert place.sources["a"].is_over
    b, c = place.sources["b"], place.sources["c"]
    assert abs(b.credit - (b.credit + c.credit) / 4) <= T
    # Once it may repeat, it comes again.
    again = Mixture([source("a"), *sources[1:]], num_targets, sequence_length=T, seed=1, place=copy(place))
    assert any(piece.document < 5 for sequence in plan(again, 9) for piece in sequence)


def test_when_all_sources_have_stopped_the_run_can_t_go_on():
    sources = [source("a", when_exhausted="stop"), source("b", when_exhausted="stop")]
    num_targets = {"a": np.array([10, 100]), "b": np.array([70])}
    mixture = Mixture(sources, num_targets, sequence_length=T, seed=1)
    assert sum(piece.length for sequence in plan(mixture, 3) for piece in sequence) == 180
    assert mixture.place().num_padding == 3 * T - 180
    with pytest.raises(TrainingFailed, match=r"data.sources \(a, b\) are used up after 3 sequences; resume with when_"):
        mixture.plan_sequence()


def test_a_place_is_carried_into_another_length_other_weights_and_other_sources(rng):
    num_targets = {name: rng.integers(1, 300, 400) for name in "abc"}
    first = Mixture([source("a"), source("b", 3.0)], num_targets, sequence_length=T, seed=2)
    plan(first, 40)
    place = copy(first.place())
    # Another length and other weights. Pieces go on where they were cut; the shares count from here.
    second_sources = [source("b"), source("c", 2.0)]
    second = Mixture(second_sources, num_targets, sequence_length=250, seed=2, place=place)
    left = {400 + document: start for document, start in place.sources["b"].waiting if start}
    pieces = [piece for sequence in plan(second, 400) for piece in sequence]
    for document, start in left.items():
        assert next(piece.start for piece in pieces if piece.document == document) == start
    now = second.place()
    assert now.sources["a"] == place.sources["a"], "it keeps its place"
    assert now.num_sequences == 440
    drawn = {name: now.sources[name].num_tokens - (name == "b") * place.sources["b"].num_tokens for name in "bc"}
    assert drawn == {name: now.sources[name].credit for name in "bc"}
    assert abs(drawn["b"] - sum(drawn.values()) / 3) <= 250
    # The first mixture again: "a" goes on with what it would have drawn.
    third = Mixture([source("a")], num_targets, sequence_length=T, seed=2, place=copy(now))
    alone = Mixture([source("a")], num_targets, sequence_length=T, seed=2, place=place)
    assert plan(third, 20) == plan(alone, 20)


def test_documents_that_are_left_out_by_now_wait_no_longer(rng):
    num_targets = {"a": rng.integers(1, 300, 400)}
    first = Mixture([source("a")], num_targets, sequence_length=T, seed=2)
    plan(first, 10)
    long_ones = source("a", length_weights=(LengthWeight(0, 0.0), LengthWeight(150, 1.0)))
    second = Mixture([long_ones], num_targets, sequence_length=T, seed=2, place=copy(first.place()))
    documents = {piece.document for sequence in plan(second, 50) for piece in sequence}
    assert num_targets["a"][list(documents)].min() >= 150


def test_few_documents_are_cut_and_little_is_padded(rng):
    num_targets = {
        name: np.maximum(rng.lognormal(np.log(median), 1.2, 20_000), 1).astype(np.int64)
        for name, median in (("a", 500), ("b", 4000))
    }
    mixture = Mixture([source("a"), source("b")], num_targets, sequence_length=8192, seed=0)
    lengths = np.concatenate(list(num_targets.values()))
    pieces = [piece for sequence in plan(mixture, 400) for piece in sequence]
    cut = {piece.document for piece in pieces if piece.length < lengths[piece.document] <= 8192}
    assert len(cut) < 0.02 * len({piece.document for piece in pieces})
    assert mixture.place().num_padding < 0.005 * 400 * 8192


@pytest.mark.parametrize(
    "spoilt",
    [
        {"num_sequences": -1},
        {"sources": {"a": {}}},
        {"sources": [3]},
        {"shares": [1]},
        {"sources": {"a": {"epoch": 0, "position": 0, "waiting": [[0]], "tokens_by_length": [0] * 6}}},
    ],
)
def test_a_place_that_is_none_is_refused(spoilt):
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
        MixturePlace.from_json(MixturePlace().to_json() | spoilt)


def test_a_place_past_the_documents_is_refused():
    mixture = Mixture([source("a")], {"a": np.array([5, 5, 5])}, sequence_length=T, seed=0)
    mixture.plan_sequence()
    place = mixture.place()
    for change in ({"position": 4}, {"waiting": ((3, 0),)}, {"waiting": ((0, 5),)}):
        spoilt = place._replace(sources={"a": place.sources["a"]._replace(**change)})
        with pytest.raises(ValueError, match="the place in 'a' is past its 3 documents"):
            Mixture([source("a")], {"a": np.array([5, 5, 5])}, sequence_length=T, seed=0, place=spoilt)


def test_a_place_is_small():
    num_targets = {name: np.full(1_000_000, 700) for name in "abcdefgh"}
    mixture = Mixture([source(name) for name in num_targets], num_targets, sequence_length=4096, seed=0)
    plan(mixture, 3)
    assert len(json.dumps(mixture.place().to_json())) < 1_500 * 8
    assert mixture_module.LENGTHS[0] == 0
