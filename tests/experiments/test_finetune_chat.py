"""The page's chats: what is asked was told before, only answers have a loss, and each length has a phase."""

import dataclasses
import json
from pathlib import Path

import pytest

from experiments import finetune_chat, generated_chats
from trainer.data import load_corpus

pytest.importorskip("jinja2", reason="renders chat templates")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(generated_chats, "FOLDER", tmp_path)
    monkeypatch.setattr(
        finetune_chat,
        "make_chats",
        lambda name, num_chats, num_words: generated_chats.make_chats(name, 12, num_words),
    )
    return tmp_path


def test_what_is_asked_was_told(rng):
    least = int(rng.integers(20, 2000))
    path = generated_chats.make_chats("any", 5, (least, 2 * least))
    content = Path(path).read_text()
    for line in content.splitlines():
        chat, told, num_asked = json.loads(line)["messages"], {}, 0
        for user, assistant in zip(chat[::2], chat[1::2], strict=True):
            assert (user["role"], assistant["role"]) == ("user", "assistant")
            thing, *rest = user["content"].split()
            if rest:
                assert thing not in told
                told[thing.removesuffix(":")] = rest[0]
                assert assistant["content"] == "noted"
            else:
                num_asked += 1
                assert assistant["content"] == f"{thing}: {told[thing]}"
        assert num_asked == len(told) // 2 > 0
        assert sum(len(turn["content"].split()) for turn in chat) <= 2 * least
    Path(path).unlink()
    assert Path(generated_chats.make_chats("any", 5, (least, 2 * least))).read_text() == content


def test_the_answers_have_the_loss_and_each_length_a_phase(folder):
    config = finetune_chat.get_config()
    assert [phase.config.sequence_length for phase in config.in_phases()] == [128, 1024, 16_384]
    config = finetune_chat.get_config(longest=1024)
    assert [phase.config.sequence_length for phase in config.in_phases()] == [128, 1024]
    data = dataclasses.replace(config.data, token_cache_dir=str(folder / "tokens"))
    corpus = load_corpus(data, vocab_size=config.model.vocab_size)
    documents = corpus.sources["short"].train
    assert documents.cuts(128)["num_chats_cut"] == 0
    for index in range(len(documents)):
        tokens = documents.tokens(index)
        weights = documents.weights(index, 0, len(tokens) - 1)
        assert set(weights) == {0.0, 1.0}
        text = corpus.tokenizer.decode(tokens[1:][weights != 0].tolist())
        assert all(word == "noted" or word.endswith(":") or word in generated_chats.ADJECTIVES for word in text.split())
