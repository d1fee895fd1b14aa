"""Chats whose answers stand far back in them, made once and kept, and a tokenizer of whole words for small models."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from experiments.retrieval_documents import FOLDER
from trainer.evaluate.tasks import NOISE
from trainer.evaluate.tasks.words import ADJECTIVES, NOUNS
from trainer.files.atomic import write_atomically

_SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>")
_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content }}<|end|>{% endgeneration %}{% else %}{{ message.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SEED = 20261129


def make_chats(name: str, num_chats: int, num_words: tuple[int, int]) -> str:
    """The file of such chats, as `SourceConfig.files` names it. It is made where it is missing.

    In a chat the user tells what each of some things is like, between sentences that say nothing, and then asks for
    half of them.

    Args:
      name: begins the file's name.
      num_chats: how many.
      num_words: least and most words of a chat.
    """
    digest = hashlib.sha256(json.dumps([2, num_chats, num_words, _SEED]).encode()).hexdigest()[:12]
    path = FOLDER.expanduser() / f"chats-{name}-{digest}.jsonl"
    if not path.is_file():
        print(f"making {path}", flush=True)
        rng = np.random.default_rng([_SEED, *num_words])
        chats = (_make_chat(rng, int(rng.integers(*num_words, endpoint=True))) for _ in range(num_chats))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, "".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return str(path)


def _make_chat(rng: np.random.Generator, num_words: int) -> list[dict[str, Any]]:
    num_told = min(max(num_words // 16, 2), len(NOUNS))
    things = dict(zip(rng.choice(NOUNS, num_told, replace=False), rng.choice(ADJECTIVES, num_told), strict=True))
    noise = NOISE.split()
    num_noise = max(num_words - 11 * num_told, 0) // num_told  # seven words of a turn that tells or asks
    messages = []
    for thing, what in things.items():
        start = int(rng.integers(len(noise)))
        around = [noise[(start + number) % len(noise)] for number in range(num_noise)]
        messages += [_turn("user", " ".join([f"{thing}: {what}", *around])), _turn("assistant", "noted")]
    for thing in rng.permutation(list(things))[: num_told // 2]:
        messages += [_turn("user", thing), _turn("assistant", f"{thing}: {things[thing]}")]
    return messages


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def make_chat_folder() -> str:
    """A tokenizer of these chats' words, with a chat template beside it; the path of its tokenizer.json."""
    things = [*NOUNS, *(f"{noun}:" for noun in NOUNS)]
    words = [*_SPECIAL, "<unknown>", "noted", *things, *ADJECTIVES, *sorted(set(NOISE.split()))]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": name, "special": True} | flags for i, name in enumerate(_SPECIAL)],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {
            "type": "WordLevel",
            "vocab": {word: number for number, word in enumerate(dict.fromkeys(words))},
            "unk_token": "<unknown>",
        },
    }
    folder = Path(FOLDER).expanduser() / "chat_tokenizer"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "chat_template.jinja", _TEMPLATE)
    write_atomically(folder / "tokenizer.json", json.dumps(content))
    return str(folder / "tokenizer.json")
