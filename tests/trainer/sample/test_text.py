"""Texts between tokens and the terminal: no half characters, no lost ones, and lines that tell whose they are."""

from __future__ import annotations

import pytest

from trainer.data import load_tokenizer
from trainer.errors import UserMistake
from trainer.sample.streams import make_streams, show_whole
from trainer.sample.text import GrowingText, encode_prompt, find_stop_token


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
    assert find_stop_token(None, tokenizer) is None
    with pytest.raises(UserMistake, match=r"the prompt '' has no token to begin with, nor have documents; give some"):
        encode_prompt("", tokenizer, 100)


def test_stop_tokens_by_id_and_text(tokenizer):
    end = tokenizer.delimiters.end
    assert find_stop_token(None, tokenizer) == end
    assert find_stop_token(end, tokenizer) == end
    assert tokenizer.decode([find_stop_token("\n", tokenizer)]) == "\n"
    with pytest.raises(UserMistake, match=r"--stop-token 9999 is not an id of the .* tokenizer; give one below 2\d\d"):
        find_stop_token(9999, tokenizer)
    with pytest.raises(UserMistake, match=r"--stop-token 'zzz' is 3 tokens of the .* tokenizer; give .* a single one"):
        find_stop_token("zzz", tokenizer)


def test_a_special_token_is_found_by_its_text(tokenizer_file):
    tokenizer = load_tokenizer(str(tokenizer_file))
    assert find_stop_token("<|endoftext|>", tokenizer) == tokenizer.delimiters.end


def test_one_text_is_shown_as_it_comes():
    shown = []
    (stream,) = make_streams(1, shown.append, width=None)
    for piece in ("ab", "c\nd", "\x1b"):
        stream.add(piece)
    stream.end()
    assert shown == ["ab", "c\nd", "\x1b", "\n"]


def test_several_texts_are_shown_by_rows_that_say_whose_they_are_and_where_lines_end():
    shown = []
    streams = make_streams(10, shown.append, width=80)
    streams[0].add("one ")
    streams[9].add("ten\n\nten")
    assert shown == ["[10] ten⏎\n", "[10] ⏎\n"]
    streams[0].add("one\nmore")
    streams[0].end()
    streams[9].end()
    streams[9].end()
    assert "".join(shown) == "[10] ten⏎\n[10] ⏎\n[1]  one one⏎\n[1]  more\n[10] ten\n"


def test_several_texts_are_whole_at_last_and_whole_alone_without_a_terminal():
    shown = []
    show_whole(["one\nmore", "two\x1b"], shown.append)
    assert "".join(shown) == "\n[1]\none\nmore\n\n[2]\ntwo␛\n\n"
    shown.clear()
    streams = make_streams(2, shown.append, width=None)
    streams[0].add("one\n")
    streams[1].add("two\x1b")
    streams[1].end()
    assert shown == ["[2]\ntwo\x1b\n\n"]
    streams[0].add("more")
    streams[0].end()
    assert shown[1:] == ["[1]\none\nmore\n\n"]


def test_a_terminal_gets_rows_that_fit_and_no_control_characters():
    shown = []
    streams = make_streams(2, shown.append, width=12)
    streams[1].add("four five\tsix seven eight\x1b[2J")
    assert "".join(shown) == "[2] four\n[2] five\tsix\n[2] seven\n[2] eight␛[2\n"
    streams[1].add("nine\x9b")
    streams[1].end()
    assert shown[-1] == "[2] Jnine\ufffd\n"
    (stream,) = make_streams(1, shown.append, width=12)
    stream.add("a long line is left to the terminal\r\n")
    assert shown[-1] == "a long line is left to the terminal␍\n"
