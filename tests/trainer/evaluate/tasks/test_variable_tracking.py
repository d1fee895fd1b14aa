"""Chains of variables as RULER defines them."""

import re
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.evaluate.tasks.oracle import read_assignments
from tests.trainer.evaluate.tasks.prose import PROSE
from trainer.data import ByteTokenizer
from trainer.evaluate.tasks import NOISE

text_of = ByteTokenizer().decode


@settings(max_examples=30)
@given(haystack=st.sampled_from([NOISE, PROSE]), seed=st.integers(0, 2**32), num_chains=st.integers(1, 5))
def test_a_chain_has_four_hops_in_order(draw, haystack, seed, num_chains):
    [example] = draw("variable_tracking", 6000, haystack=haystack, seed=seed, num_questions=num_chains)
    text = text_of(example.context)
    assignments = read_assignments(text)
    assert len(assignments) == len(dict(assignments)) == 5 * num_chains, "each variable is assigned once"
    lines = re.findall(r"(?<=\n)VAR .*", text)
    assert lines[5:] == [f"VAR {name} = {'' if s.isdigit() else 'VAR '}{s}" for name, s in assignments], "own lines"
    sources = dict(assignments)
    place = {name: number for number, (name, _) in enumerate(assignments)}
    values = [source for source in sources.values() if source.isdigit()]
    assert len(set(values)) == num_chains
    chains = [question.text.split(", ") for question in example.questions]
    assert sorted(name for chain in chains for name in chain) == sorted(sources)
    for chain, question in zip(chains, example.questions, strict=True):
        assert len(chain) == 5
        assert [sources[name] for name in chain[1:]] == chain[:-1]
        assert all(place[before] < place[name] for before, name in pairwise(chain))
        assert f"assigned the value {sources[chain[0]]}" in text_of(question.prompt)
        assert "5 variables" in text_of(question.prompt)


def test_the_answered_question_has_other_variables_and_another_value(draw, rng):
    for example in draw("variable_tracking", num_examples=20, seed=int(rng.integers(2**32))):
        [question] = example.questions
        text, prompt = text_of(example.context), text_of(question.prompt)
        shown = re.findall(r"^VAR ([A-Z]{3}) = (?:VAR )?(\w+)$", text, re.MULTILINE)
        names, sources = zip(*shown, strict=True)
        assert len(set(names)) == 5
        assert sources[1:] == names[:-1]
        assert sources[0] not in prompt
        answered = prompt.replace(re.findall(r"\d{5}", prompt)[0], sources[0])
        assert f"{answered} {', '.join(names)}\n" in text
        assert text.count("Memorize and track the chain(s)") == 2
