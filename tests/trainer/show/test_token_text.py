"""The texts of tokens, joined, are what the tokenizer decodes, and no character is divided."""

import json

import numpy as np
import pytest

from trainer.data import ByteTokenizer, load_tokenizer
from trainer.show.token_text import texts_of


@pytest.fixture
def byte_fallback(tmp_path):
    """A tokenizer as Llama 2's: spaces belong to the words behind them, and bytes stand for rare characters."""
    names = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abc", "\u2581a", "\u2581ab"]
    special = {"special": True} | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": names[i]} | special for i in (0, 1)],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "vocab": {name: i for i, name in enumerate(names)},
            "merges": [["\u2581", "a"], ["\u2581a", "b"]],
            "byte_fallback": True,
            "fuse_unk": True,
            "unk_token": None,
        },
    }
    (tmp_path / "fallback.json").write_text(json.dumps(content))
    return load_tokenizer(str(tmp_path / "fallback.json"))


@pytest.fixture(params=["byte", "byte_level", "byte_fallback"])
def tokenizer(request, tokenizer_file, byte_fallback):
    return {
        "byte": ByteTokenizer(), "byte_level": load_tokenizer(str(tokenizer_file)), "byte_fallback": byte_fallback
    }[request.param]  # fmt: skip


def test_the_texts_join_to_the_text(tokenizer, random_texts):
    for text in random_texts(40):
        text = f" a ab {text}"
        ids = np.array(tokenizer.encode(text), np.int32)
        shown = texts_of(tokenizer, ids, np.ones(len(ids), np.float32))
        assert "".join(each.text for each in shown) == tokenizer.decode(ids.tolist())
        assert [token for each in shown for token in each.ids] == ids.tolist()
        assert all("\ufffd" not in each.text for each in shown)


def test_bytes_that_are_no_text_and_other_weights_lose_no_token(tokenizer, rng):
    ids = rng.integers(0, tokenizer.vocab_size, 300).astype(np.int32)
    weights = rng.choice(np.array([0, 1, -0.5, np.nan], np.float32), 300)
    shown = texts_of(tokenizer, ids, weights)
    assert [token for each in shown for token in each.ids] == ids.tolist()
    found = np.array([each.weight if each.weight is not None else np.nan for each in shown for _ in each.ids])
    np.testing.assert_array_equal(found, weights)
    special = {token for each in shown if each.is_special for token in each.ids}
    assert special == {token for token in set(ids.tolist()) if tokenizer.is_skipped(token)}
