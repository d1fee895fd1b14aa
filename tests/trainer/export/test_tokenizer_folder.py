"""The tokenizer that an export takes along: before a text it puts what documents began with."""

from __future__ import annotations

import json

import pytest

from trainer.data import load_tokenizer
from trainer.data.documents import Delimiters
from trainer.export.tokenizer_folder import special_token_ids, tokenizer_folder

BOS = ("<s>", 1)
CONFIG = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"}
MAP = {"bos_token": "<s>", "pad_token": "a"}


def _special(token: int, content: str) -> dict:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": content, "special": True} | flags


@pytest.fixture
def write(tmp_path):
    """Writes a tokenizer that puts <s> before a text, or nothing, and the files that are to lie beside it."""
    from tokenizers import Tokenizer, models, processors

    def write(name: str = "tokenizer.json", adds: bool = True, **beside: dict):
        vocabulary = {"</s>": 0, "<s>": 1, "a": 2, "b": 3}
        tokenizer = Tokenizer(models.BPE(vocabulary, []))
        tokenizer.add_special_tokens(["</s>", "<s>"])
        if adds:
            tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[BOS])
        tokenizer.save(str(tmp_path / name))
        for file, content in beside.items():
            (tmp_path / f"{file}.json").write_text(json.dumps(content))
        return tmp_path / name

    return write


def _exported(tokenizer) -> dict:
    """What the folder holds, and the ids of a text by its tokenizer.json."""
    from tokenizers import Tokenizer

    with tokenizer_folder(tokenizer) as folder:
        found = {path.stem: json.loads(path.read_text()) for path in folder.iterdir() if path.suffix == ".json"}
        ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("ab").ids
        return found | {"ids": ids, "folder": folder}


def test_a_folder_that_tells_what_documents_began_with_is_taken_as_it_is(write):
    path = write(tokenizer_config=CONFIG)
    exported = _exported(load_tokenizer(str(path)))
    assert exported["folder"] == path.parent
    assert exported["ids"] == [1, 2, 3]


@pytest.mark.parametrize("adds", [True, False])
def test_what_says_nothing_of_a_beginning_is_told_by_a_config(write, adds):
    path = write("some.json", adds)
    tokenizer = load_tokenizer(str(path))
    exported = _exported(tokenizer)
    assert exported["tokenizer"] == json.loads(path.read_text())
    assert exported["tokenizer_config"] == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": adds,
        "bos_token": "<s>" if adds else "</s>",
        "eos_token": "</s>",
    }
    assert exported["ids"] == [1, 2, 3] if adds else [2, 3]
    assert special_token_ids(tokenizer.delimiters) == {"bos_token_id": int(adds), "eos_token_id": 0}


@pytest.mark.parametrize(
    ("begin", "ids", "told"),
    [
        ("none", [2, 3], {"add_bos_token": False, "bos_token": None}),
        ("</s>", [0, 2, 3], {"add_bos_token": True, "bos_token": "</s>"}),
        ("b", [3, 2, 3], {"add_bos_token": True, "bos_token": "b"}),
    ],
)
def test_another_beginning_is_told_by_all_files(write, begin, ids, told):
    generation = {"bos_token_id": 1, "eos_token_id": [0, 7], "temperature": 0.5}
    path = write(tokenizer_config=CONFIG, special_tokens_map=MAP, generation_config=generation)
    tokenizer = load_tokenizer(str(path), None, begin)
    exported = _exported(tokenizer)
    assert exported["ids"] == ids
    assert exported["tokenizer_config"] == CONFIG | told
    assert exported["special_tokens_map"] == MAP | {"bos_token": told["bos_token"]}
    assert exported["generation_config"] == generation | {"bos_token_id": tokenizer.delimiters.begin}
    assert json.loads(path.read_text())["post_processor"]["special_tokens"], "the tokenizer's own file stays"
    (path.parent / "out").mkdir()
    for name in ("tokenizer", "tokenizer_config"):
        (path.parent / "out" / f"{name}.json").write_text(json.dumps(exported[name]))
    again = load_tokenizer(str(path.parent / "out" / "tokenizer.json"))
    assert again.delimiters == (tokenizer.delimiters if begin != "none" else Delimiters(0, 0))


@pytest.mark.parametrize("name", ["tokenizer.json", "some.json"])
@pytest.mark.parametrize("adds", [True, False])
def test_where_the_files_contradict_each_other_both_say_what_was_trained_on(write, name, adds):
    # transformers 5 follows the post-processor alone, 4 follows either, by its class of the tokenizer.
    path = write(name, not adds, tokenizer_config=CONFIG | {"add_bos_token": adds})
    exported = _exported(load_tokenizer(str(path)))
    assert exported["ids"] == [1, 2, 3] if adds else [2, 3]
    assert exported["tokenizer_config"]["add_bos_token"] is adds


def test_what_is_no_tokenizer_of_a_file_has_no_folder():
    for tokenizer in (None, load_tokenizer("byte")):
        with tokenizer_folder(tokenizer) as folder:
            assert folder is None
