"""Tokenizers of each family, trained on a little English."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.trainer.evaluate.tasks.prose import PROSE
from trainer.data import ByteTokenizer, Tokenizer, load_tokenizer
from trainer.evaluate.tasks import NOISE, RULER, Example, make_examples


def _gpt2_like():
    """Byte-level BPE. A word has the space before it, and a line's indentation the newline."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return tokenizer, trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )


def _qwen_like():
    """Byte-level BPE. Punctuation has the newlines after it, and numbers are split into digits."""
    from tokenizers import Regex, pre_tokenizers

    tokenizer, trainer = _gpt2_like()
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    pattern = words + r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer, trainer


def _llama2_like():
    """BPE of SentencePiece: a space before each text, and bytes for what the vocabulary lacks, such as newlines."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Metaspace(prepend_scheme="first")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer, trainers.BpeTrainer(vocab_size=900, special_tokens=names, show_progress=False)


def _t5_like():
    """Unigram of SentencePiece: its normalizer makes one space of white space."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.Replace(Regex(r"\s+"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return tokenizer, trainers.UnigramTrainer(
        vocab_size=400, special_tokens=["</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )


_MAKERS = {"gpt2": _gpt2_like, "qwen": _qwen_like, "llama2": _llama2_like, "t5": _t5_like}
FAMILIES = ("byte", *_MAKERS)


@pytest.fixture(scope="session")
def tokenizers_by_family(tmp_path_factory) -> dict[str, Tokenizer]:
    folder: Path = tmp_path_factory.mktemp("tokenizers")
    loaded: dict[str, Tokenizer] = {"byte": ByteTokenizer()}
    characters = "".join(map(chr, range(33, 127)))
    for family, make in _MAKERS.items():
        tokenizer, trainer = make()
        tokenizer.train_from_iterator([*PROSE.split("\n"), *characters], trainer)
        content = json.loads(tokenizer.to_str())
        # A trainer knows no other way to have byte tokens than as special ones, which no text may become.
        content["added_tokens"] = [added for added in content["added_tokens"] if not added["content"].startswith("<0x")]
        (folder / f"{family}.json").write_text(json.dumps(content))
        loaded[family] = load_tokenizer(str(folder / f"{family}.json"))
    return loaded


@pytest.fixture(params=FAMILIES)
def tokenizer(request, tokenizers_by_family) -> Tokenizer:
    """A tokenizer of each family."""
    return tokenizers_by_family[request.param]


@pytest.fixture(params=RULER)
def task(request) -> str:
    """The name of each task."""
    return request.param


@pytest.fixture(scope="session")
def draw() -> Callable[..., list[Example]]:
    """`make_examples` with what a test doesn't say."""

    def draw(task: str, length: int = 4096, **arguments) -> list[Example]:
        usual = {"num_examples": 1, "num_questions": 1, "depths": None, "tokenizer": ByteTokenizer()}
        return make_examples(task, length, **usual | {"haystack": NOISE, "seed": 0} | arguments)

    return draw
