"""The tokens around a text, by a Hugging Face `tokenizer.json` and the `tokenizer_config.json` beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.data.files import read_at_most
from trainer.errors import DataError

MAX_FILE_BYTES = 2**28
"""Of either file. Published ones have up to 35 MB."""
CONFIG_NAME = "tokenizer_config.json"
_BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))


def read_stated(tokenizer_file: Path) -> dict[str, Any]:
    """The content of the `tokenizer_config.json` beside a tokenizer; empty: there is none.

    Raises:
        DataError: it can't be read, or isn't an object of JSON.
    """
    path = tokenizer_file.with_name(CONFIG_NAME)
    try:
        content = read_at_most(path, MAX_FILE_BYTES)
        stated = json.loads(content or b"")
        if not isinstance(stated, dict):
            raise ValueError("it is no object")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"{path}, which tells the special tokens of the tokenizer beside it, can't be read: {error}; "
            "mend it, or move it away"
        ) from error
    return stated


def stated_token(stated: dict[str, Any], name: str) -> str | None:
    """A special token that a `tokenizer_config.json` names, such as `bos_token`; None: it names none."""
    token = stated.get(name)
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


_Named = tuple[str, int]  # a token's name and its id


def tokens_around_text(post_processor: Any) -> tuple[list[_Named], list[_Named]]:
    """The tokens, by name and id, that a tokenizer's post-processor adds before a text and after it.

    Args:
        post_processor: as `tokenizers` writes it.

    Raises:
        ValueError: it names a special token by more or fewer ids than names.
    """
    before: list[_Named] = []
    after: list[_Named] = []
    match post_processor and post_processor["type"]:
        case "TemplateProcessing":
            around = before
            for piece in post_processor["single"]:
                if "Sequence" in piece:
                    around = after
                else:
                    added = post_processor["special_tokens"][piece["SpecialToken"]["id"]]
                    names, ids = added["tokens"], added["ids"]
                    if len(names) != len(ids):
                        raise ValueError(
                            f"its post-processor has {len(ids)} ids for the {len(names)} tokens of {added['id']!r}; "
                            "expected one id for each token"
                        )
                    around += zip(names, ids, strict=True)
        case "BertProcessing" | "RobertaProcessing":
            before, after = [tuple(post_processor["cls"])], [tuple(post_processor["sep"])]
        case "Sequence":
            for part in post_processor["processors"]:
                first, last = tokens_around_text(part)
                before, after = [*first, *before], [*after, *last]
    return before, after


def set_tokens_before_text(tokenizer: dict[str, Any], before: Sequence[_Named]) -> None:
    """Has a tokenizer's post-processor add other tokens before a text, and after it what it did.

    Args:
        tokenizer: the content of its `tokenizer.json`, which is changed.
        before: names and ids.
    """
    _, after = tokens_around_text(tokenizer["post_processor"])
    first, last = ([{"SpecialToken": {"id": name, "type_id": 0}} for name, _ in each] for each in (before, after))
    text, second_text = ([{"Sequence": {"id": name, "type_id": number}}] for number, name in enumerate("AB"))
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [*first, *text, *last],
        "pair": [*first, *text, *last, *second_text, *last],
        "special_tokens": {name: {"id": name, "ids": [each], "tokens": [name]} for name, each in (*before, *after)},
    }


def respell(tokenizer_json: str, names: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """A `tokenizer.json` with other names for some tokens, so that no text becomes them.

    Their ids stay. Merges that make or use them are left out, so that BPE makes other tokens of such text. A token of
    one character keeps its name, and so does one of byte fallback: nothing else could stand for that text.

    Args:
        tokenizer_json: as `tokenizers` writes it.
        names: the tokens, and for each a name that no text holds.

    Returns:
        The content, and those of the names that it has.
    """
    tokenizer = json.loads(tokenizer_json)
    model = tokenizer["model"]
    prefix, suffix = (model.get(name) or "" for name in ("continuing_subword_prefix", "end_of_word_suffix"))
    fallback = _BYTE_TOKENS if model.get("byte_fallback") else frozenset()
    other = {
        token: name
        for token, name in names.items()
        if len(token.removeprefix(prefix).removesuffix(suffix)) > 1 and token not in fallback
    }
    if isinstance(model["vocab"], dict):
        model["vocab"] = {other.get(token, token): each for token, each in model["vocab"].items()}
    else:
        model["vocab"] = [[other.get(token, token), score] for token, score in model["vocab"]]
    if model.get("unk_token") in other:
        model["unk_token"] = other[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [
            [first, second]
            for first, second in model["merges"]
            if not other.keys() & {first, second, first + second[len(prefix) :]}
        ]
    for added in tokenizer["added_tokens"]:
        added["content"] = other.get(added["content"], added["content"])
    tokenizer["post_processor"] = None
    return json.dumps(tokenizer), other
