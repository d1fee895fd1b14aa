"""Prompts as tokens, and texts on their way to the terminal."""

from __future__ import annotations

import sys

import pytest

from layers.generator import NewToken, SampleRequest
from trainer.data import load_tokenizer
from trainer.errors import UserMistake
from trainer.sample.continuation import _show
from trainer.sample.text import encode_prompt


@pytest.fixture(params=["byte", "Hugging Face"])
def tokenizer(request):
    return load_tokenizer("byte" if request.param == "byte" else str(request.getfixturevalue("tokenizer_file")))


def test_a_prompt_begins_a_document_unless_it_fills_the_context(tokenizer):
    end, ids = tokenizer.delimiters.end, tuple(tokenizer.encode("the cat"))
    assert encode_prompt("", tokenizer, 100) == (end,)
    assert encode_prompt("the cat", tokenizer, len(ids) + 1) == (end, *ids)
    assert encode_prompt("the cat", tokenizer, len(ids)) == ids
    assert encode_prompt("the cat", tokenizer, len(ids) - 1) == ids


def test_a_prompt_begins_as_documents_do(tokenizer_file):
    tokenizer = load_tokenizer(str(tokenizer_file), None, "a")
    ids = tuple(tokenizer.encode("the c"))
    assert encode_prompt("the c", tokenizer, 100) == (tokenizer.delimiters.begin, *ids)
    tokenizer = load_tokenizer(str(tokenizer_file), "none", "none")
    assert encode_prompt("the c", tokenizer, 100) == ids
    with pytest.raises(UserMistake, match=r"the prompt '' has no token to begin with, nor have documents; give some"):
        encode_prompt("", tokenizer, 100)


@pytest.mark.parametrize(("is_terminal", "shown"), [(True, "a␛[2Jb\n"), (False, "a\x1b[2Jb\n")])
def test_only_a_terminal_is_spared_control_characters(monkeypatch, capsys, is_terminal, shown):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    _show(
        iter([NewToken(0, 98, is_last=True)]), ["a\x1b[2J"], [SampleRequest((97,), 1, 0, None)], load_tokenizer("byte")
    )
    assert capsys.readouterr().out == shown
