"""Texts between tokens and the terminal: no half characters, and no lost ones."""

from __future__ import annotations

import sys

import pytest

from layers.generator import SampleRequest
from trainer.data import load_tokenizer
from trainer.errors import UserMistake
from trainer.sample.continuation import _show
from trainer.sample.text import GrowingText, encode_prompt


@pytest.fixture(params=["byte", "Hugging Face"])
def tokenizer(request):
    return load_tokenizer("byte" if request.param == "byte" else str(request.getfixturevalue("tokenizer_file")))


def pieces_of(tokenizer, ids, before=()):
    text = GrowingText(tokenizer, before)
    return [*(text.add(token) for token in ids), text.end()]


def test_text_grows_by_whole_characters(tokenizer, random_texts):
    for text in random_texts(20):
        pieces = pieces_of(tokenizer, tokenizer.encode(text), before=[tokenizer.delimiters.end])
        assert "".join(pieces) == text
        assert "\ufffd" not in "".join(pieces)
        assert pieces[-1] == ""
    assert all(pieces_of(tokenizer, tokenizer.encode("the cat"))[:-1]), "what is whole was held back"


def test_what_is_no_text_is_shown_as_the_decoder_would_show_it_all(rng):
    tokenizer = load_tokenizer("byte")
    for _ in range(20):
        ids = rng.choice([0x41, 0x80, 0x9F, 0xC3, 0xE2, 0x82, 0xAC, 0xF0, 0xFF], rng.integers(1, 60)).tolist()
        before = tokenizer.encode("é")
        assert "".join(pieces_of(tokenizer, ids, before)) == bytes(ids).decode(errors="replace")


def test_a_cut_character_is_told_at_the_end():
    assert pieces_of(load_tokenizer("byte"), "né".encode()[:-1]) == ["n", "", "\ufffd"]


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


@pytest.mark.parametrize(("is_terminal", "shown"), [(True, "a␛[2J\n"), (False, "a\x1b[2J\n")])
def test_only_a_terminal_is_spared_control_characters(monkeypatch, capsys, is_terminal, shown):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    _show(iter([]), ["a\x1b[2J"], [SampleRequest((97,), 1, 0, None)], load_tokenizer("byte"))
    assert capsys.readouterr().out == shown
