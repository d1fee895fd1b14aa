"""A key's word stands behind it once, at its depth."""

import re

import numpy as np
import pytest

from trainer.data import ByteTokenizer
from trainer.errors import UserMistake
from trainer.evaluate.tasks import NOISE, make_examples


def test_each_key_has_one_word_at_its_depth():
    depths, tokenizer = [0.0, 0.3, 1.0], ByteTokenizer()
    for seed in np.random.default_rng().integers(2**31, size=3).tolist():
        options = {"num_examples": 6, "num_questions": 2, "depths": depths, "tokenizer": tokenizer, "haystack": NOISE}
        examples = make_examples("key_values", 3000, **options, seed=seed)
        for example in examples:
            text = tokenizer.decode(example.context)
            lines = dict(re.findall(r"^([a-z]+:) ([a-z]+)$", text, re.M))
            assert len(lines) == 2
            for question in example.questions:
                prompt = tokenizer.decode(question.prompt).strip()
                assert lines[prompt] == question.text == tokenizer.decode(question.answer).strip()
                assert text.count(prompt) == 1
                assert abs(text.index(prompt) / len(text) - example.depth) < 0.1


def test_more_questions_than_keys_are_refused():
    options = {"num_examples": 1, "num_questions": 1000, "depths": None, "tokenizer": ByteTokenizer(), "seed": 0}
    with pytest.raises(UserMistake, match="num_questions=1000 of key_values needs as many keys, and there are"):
        make_examples("key_values", 9000, haystack=NOISE, **options)
