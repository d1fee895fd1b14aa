"""Who names a folder, SentencePiece's file or a name on the Hub as the tokenizer is told which file was meant."""

import pytest

from trainer.data import load_tokenizer
from trainer.data.tokenizer_path import require_tokenizer_file
from trainer.errors import DataError


def refusal(name: str) -> str:
    with pytest.raises(DataError) as caught:
        load_tokenizer(name)
    return str(caught.value)


@pytest.mark.parametrize("name", ["", "/", "/tokenizer.model", "/vocab.json", "/merges.txt", "/tokenizer_config.json"])
def test_the_tokenizer_json_beside_it_is_named(tmp_path, make_tokenizer, name):
    beside = make_tokenizer(tmp_path / "tokenizer.json")
    if name.strip("/"):
        (tmp_path / name.strip("/")).write_text("{}")
    told = refusal(f"{tmp_path}{name}")
    assert told.startswith(f"data.tokenizer='{tmp_path}")
    assert told.endswith(f"; did you mean {beside}?")


@pytest.mark.parametrize("other", ["tokenizer.model", "cl100k.tiktoken", "vocab.txt", "special_tokens_map.json"])
def test_where_there_is_none_transformers_makes_one(tmp_path, other):
    (tmp_path / other).write_bytes(b"\n\x0e\n")
    remedy = f"AutoTokenizer.from_pretrained('{tmp_path}').save_pretrained('{tmp_path}')"
    for named in (tmp_path, tmp_path / other, tmp_path / "tokenizer.json"):
        told = refusal(str(named))
        assert told.startswith(f"data.tokenizer='{named}' ")
        assert told.endswith(remedy)


@pytest.mark.parametrize("name", ["gpt2", "meta-llama/Llama-3.2-1B"])
def test_a_name_on_the_hub_is_downloaded_by_hand(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    told = refusal(name)
    assert f"data.tokenizer='{name}' cannot be read: No such file or directory; give `byte` or" in told
    assert told.endswith(f"hf download {name} tokenizer.json --local-dir DIR")


@pytest.mark.parametrize("name", ["missing.json", "no/such/tokenizer.json", "a b/c", "."])
def test_anything_else_is_just_missing_or_a_folder(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    reason = "Is a directory" if name == "." else "No such file or directory"
    assert refusal(name).endswith(f"cannot be read: {reason}; give `byte` or a tokenizer.json's path")


def test_a_file_of_another_name_passes(tmp_path, make_tokenizer):
    require_tokenizer_file(make_tokenizer(tmp_path / "mine.json"), "data.tokenizer")
    require_tokenizer_file(make_tokenizer(tmp_path / "tokenizer-v2.json"), "data.tokenizer")
