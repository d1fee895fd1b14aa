"""Chats are rendered, tokenized and masked as transformers does, on random conversations and tokenizers."""

import json

import numpy as np
import pytest

from tests.trainer.data.chat_templates import STYLES, make_folder, random_chat
from trainer.config import ChatConfig
from trainer.data import load_tokenizer
from trainer.data.chat_tokenization import ChatTokenizer
from trainer.data.token_cache import TokenCache

transformers = pytest.importorskip("transformers", reason="needs transformers")

NUM_CHATS = 200


@pytest.mark.parametrize("style", STYLES)
def test_ids_and_masks_are_those_of_transformers(style, tmp_path, rng):
    file = make_folder(tmp_path / "folder", STYLES[style], rng)
    theirs = transformers.AutoTokenizer.from_pretrained(file.parent)
    calls = style not in ("phi", "gemma", "plain", "parts")
    tool = {"type": "function", "function": {"name": "find_1", "parameters": {"b": 1, "a": "<é>"}}}
    rows = [
        {"messages": random_chat(rng, calls=calls), **({"tools": [tool]} if rng.random() < 0.3 else {})}
        for _ in range(NUM_CHATS)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ours = ChatTokenizer(ChatConfig(), load_tokenizer(str(file)))
    documents = ours.tokenize([tmp_path / "chats.jsonl"], TokenCache(tmp_path / "cache"), print).documents
    for number, row in enumerate(rows):
        expected = theirs.apply_chat_template(
            row["messages"], row.get("tools"), return_dict=True, return_assistant_tokens_mask=True
        )
        assert documents.tokens(number).tolist() == expected["input_ids"]
        mask = documents.weights(number, 0, len(expected["input_ids"]) - 1)
        np.testing.assert_array_equal(mask, expected["assistant_masks"][1:], err_msg=str(row))
        assert 0 < mask.sum() < len(mask)
