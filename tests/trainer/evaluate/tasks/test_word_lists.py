"""Frequencies of the words of lists and codes, as RULER defines them."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.evaluate.tasks.oracle import read_code, read_list
from trainer.data import ByteTokenizer
from trainer.evaluate.tasks.frequent_words import MIN_WORDS
from trainer.evaluate.tasks.words import NUM_SYLLABIC_WORDS, draw_letters, syllabic_word

text_of = ByteTokenizer().decode


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32), length=st.integers(2000, 60_000))
def test_ten_words_are_common(draw, seed, length):
    [example] = draw("common_words", length, seed=seed)
    counts = Counter(read_list(text_of(example.context)))
    common = example.questions[0].text.split(", ")
    often, seldom = {counts.pop(word) for word in common}, set(counts.values())
    assert len(set(common)) == 10
    assert (often, seldom) in [({30}, {3}), ({6}, {1})]
    if length >= 12_000:
        assert often == {30}
    if length < 4096:
        assert often == {6}
    if often == {30}:
        assert 3 * len(counts) >= 300, "as many items of other words"


def test_the_answered_list_has_other_words_and_its_own_ten(draw):
    for length, num_words, often, seldom in ((3000, 20, 3, 1), (30_000, 40, 10, 3)):
        [example] = draw("common_words", length)
        shown, asked, rest = text_of(example.context).partition("\nQuestion: What are the 10 most common words")
        assert asked
        counts = Counter(read_list(shown))
        answered = rest.partition("list are: ")[2].partition("\n")[0].split(", ")
        assert counts.most_common(10) == [(word, often) for word in answered]
        assert [counts[word] for word in counts if word not in answered] == [seldom] * (num_words - 10)
        assert not counts.keys() & set(read_list(text_of(example.context)))
        assert text_of(example.questions[0].prompt).endswith("list are:")


def test_common_words_are_anywhere_in_the_list(draw):
    places = []
    for example in draw("common_words", 20_000, num_examples=10):
        words = read_list(text_of(example.context))
        common = set(example.questions[0].text.split(", "))
        places += [number / len(words) for number, word in enumerate(words) if word in common]
    counts = np.bincount((np.array(places) * 4).astype(int))
    assert len(places) == 3000
    assert counts.min() > 600, counts


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32), length=st.integers(1200, 100_000))
def test_frequencies_follow_the_zeta_distribution(draw, seed, length):
    [example] = draw("frequent_words", length, seed=seed)
    counts = Counter(read_code(text_of(example.context)))
    ranked = counts.most_common()
    assert ranked[0][0] == "..."
    assert [word for word, _ in ranked[1:4]] == example.questions[0].text.split(", ")
    assert all(len(word) == 6 and word.isalpha() and word.islower() for word, _ in ranked[1:])
    # There is an n by which all counts are floor(n / (zeta(2) k^2)), and no word of a lower rank.
    scaled = [(count * rank**2, (count + 1) * rank**2) for rank, (_, count) in enumerate(ranked, 1)]
    least, over = max(low for low, _ in scaled), min(high for _, high in scaled)
    assert least < over
    assert least < (len(ranked) + 1) ** 2
    share = ranked[0][1] / sum(counts.values())
    if length > 20_000:  # the first of many ranks
        assert share == pytest.approx(6 / math.pi**2, abs=0.03)


def test_no_text_ends_in_dots(draw):
    assert {read_code(text_of(each.context))[-1].isalpha() for each in draw("frequent_words", num_examples=12)} == {
        True
    }


def test_the_words_asked_for_are_more_frequent_than_all_others():
    for num_words in [*range(MIN_WORDS, 5000), 10**6, 10**7]:
        counts = [int(num_words / (math.pi**2 / 6) / rank**2) for rank in range(1, 6)]
        assert sorted(set(counts), reverse=True) == counts


def test_words_are_distinct(rng):
    assert len({syllabic_word(number) for number in range(0, NUM_SYLLABIC_WORDS, 7)}) == len(
        range(0, NUM_SYLLABIC_WORDS, 7)
    )
    assert {len(syllabic_word(int(number))) for number in rng.integers(NUM_SYLLABIC_WORDS, size=100)} == {6}
    seed = int(rng.integers(2**32))
    few, many = (draw_letters(np.random.default_rng(seed), count, 1) for count in (20, 26))
    assert many[:20] == few
    assert sorted(many) == list("abcdefghijklmnopqrstuvwxyz")
