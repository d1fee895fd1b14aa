"""Makes a corpus from a `DataConfig`: its documents, split and checked, and their description."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config import DataConfig
from trainer.data.bin_files import BinFiles, check_ids, open_bin_files
from trainer.data.bin_layout import default_end_of_document_id
from trainer.data.chat_tokenization import ChatTokenizer
from trainer.data.documents import NONE, Delimiters, Documents, TokenizedFiles
from trainer.data.files import find_files
from trainer.data.mixture import Mixture
from trainer.data.readers import read_text
from trainer.data.stdlib import find_stdlib_files
from trainer.data.token_cache import OnProgress, TokenCache
from trainer.data.tokenization import document_hash, encode_documents, tokenize_files
from trainer.data.tokenizers import PretokenizedIds, Tokenizer, load_tokenizer
from trainer.data.tree_tokenization import tokenize_trees
from trainer.data.trees import Trees
from trainer.data.unigram import UnigramEstimate, count_targets, estimate_of_mixture, estimate_unigram_entropy
from trainer.errors import DataError

# The tokenizer, the training files, and the validation files if the user has named them.
_Loaded = tuple[Tokenizer, TokenizedFiles, TokenizedFiles | None]
# Loads the tokenizer that the config names, once.
_FindTokenizer = Callable[[], Tokenizer]


@dataclass(frozen=True)
class CorpusSource:
    """Tokenized documents of one source, split into training and validation.

    Args:
        source: `data.source`, or the format of one of `data.sources`.
        tokenizer: the tokenizer that made the tokens.
        train: documents to train on.
        validation: documents held out.
        fingerprint: hex digest of tokens, boundaries, tokenizer and split; equal on every machine that sees the
            same data, wherever it lies.
    """

    source: str
    tokenizer: Tokenizer
    train: Documents
    validation: Documents
    fingerprint: str

    def counts(self) -> dict[str, Any]:
        """Documents, tokens and bytes of each split, ready for JSON. End-of-document counts as a token."""
        return {
            split: {
                "num_documents": len(documents),
                "num_tokens": documents.num_tokens,
                "num_bytes": documents.num_bytes,
            }
            for split, documents in (("train", self.train), ("validation", self.validation))
        }


@dataclass(frozen=True)
class Corpus(CorpusSource):
    """The documents of a run.

    Args:
        unigram: the loss of the best model without context, on the training split.
        sources: those of `data.sources` by name, in order, whose documents these are, end to end; empty: it is no
            mixture.
    """

    unigram: UnigramEstimate
    sources: Mapping[str, CorpusSource] = field(default_factory=dict)

    @property
    def unigram_nats_per_token(self) -> float:
        """Entropy of the training targets' distribution."""
        return self.unigram.nats_per_token

    def summary(self) -> dict[str, Any]:
        """The record's entry about the corpus, ready for JSON."""
        return {
            "source": self.source,
            "tokenizer": self.tokenizer.name,
            "tokenizer_vocab_size": self.tokenizer.vocab_size,
            "begin_of_document_id": self.tokenizer.delimiters.begin,
            "end_of_document_id": self.tokenizer.delimiters.end,
            "fingerprint": self.fingerprint,
            **self.counts(),
            **({"sources": {name: each.counts() for name, each in self.sources.items()}} if self.sources else {}),
            "unigram_nats_per_token": self.unigram.nats_per_token,
            "unigram_num_tokens": self.unigram.num_tokens,
        }


def load_corpus(config: DataConfig, *, vocab_size: int, on_progress: OnProgress = lambda line: None) -> Corpus:
    """Opens, tokenizes where needed, splits and checks the data of a run. Touches no device.

    Documents are held out by a hash – of the path in the standard library, of the text elsewhere, of the
    document's number in `.bin` files – so the split depends on nothing but the data and
    `validation_fraction`. At least one is held out and one trained on; a single document is cut in two.

    Args:
        config: where the data is.
        vocab_size: the model's; ids must be below it.
        on_progress: called with a line about work that takes long (tokenizing, the first reading of `.bin` files).

    Raises:
        DataError: the data cannot be trained on.
        TrainingFailed: a file changes while it is read.

    Example:
        >>> corpus = load_corpus(DataConfig(), vocab_size=257)
        >>> corpus.tokenizer.vocab_size
        257
    """
    find_tokenizer = functools.cache(lambda: _load_tokenizer(config, vocab_size))
    if config.sources:
        return _load_mixture(config, vocab_size, find_tokenizer, on_progress)
    only = _load_source(config, vocab_size, find_tokenizer, on_progress)
    return Corpus(**vars(only), unigram=estimate_unigram_entropy(only.train, vocab_size))


def _load_mixture(
    config: DataConfig, vocab_size: int, find_tokenizer: _FindTokenizer, on_progress: OnProgress
) -> Corpus:
    sources: dict[str, CorpusSource] = {}
    for each in config.sources:
        own = dataclasses.replace(config, sources=(), source=each.format, files=each.files, text_field=each.text_field)
        say = functools.partial(_say_of, each.name, on_progress)
        try:
            sources[each.name] = _load_source(own, vocab_size, find_tokenizer, say)
        except DataError as refused:
            raise DataError(f"data.sources {each.name!r}: {refused}") from refused
    tokenizer = _same_tokenizer(sources)
    num_targets = {name: each.train.num_targets for name, each in sources.items()}
    Mixture(config.sources, num_targets, sequence_length=1, seed=0)  # refuses what leaves no document
    total = sum(each.weight for each in config.sources)
    known = [[name, each.fingerprint] for name, each in sources.items()]
    train, validation = (
        Documents.join([getattr(each, split) for each in sources.values()]) for split in ("train", "validation")
    )
    return Corpus(
        source="mixture",
        tokenizer=tokenizer,
        train=train,
        validation=validation,
        fingerprint=hashlib.sha256(json.dumps(known).encode()).hexdigest(),
        unigram=estimate_of_mixture(
            [(each.weight / total, count_targets(sources[each.name].train, vocab_size)) for each in config.sources]
        ),
        sources=sources,
    )


def _say_of(name: str, on_progress: OnProgress, line: str) -> None:
    on_progress(f"{name}: {line}")


def _same_tokenizer(sources: Mapping[str, CorpusSource]) -> Tokenizer:
    """The tokenizer of all sources; that of most ids where files hold them, which don't name it."""
    first_name, first = next(iter(sources.items()))
    for name, each in sources.items():
        ours, theirs = first.tokenizer, each.tokenizer
        if (ours.identity, ours.delimiters) != (theirs.identity, theirs.delimiters):
            raise DataError(
                f"data.sources: {first_name!r} has tokenizer {ours.name} and documents {ours.delimiters}, and "
                f"{name!r} has tokenizer {theirs.name} and documents {theirs.delimiters}; a mixture has one of each: "
                "set data.tokenizer, and data.begin_of_document_token and data.end_of_document_token if these differ"
            )
    return max((each.tokenizer for each in sources.values()), key=lambda tokenizer: tokenizer.vocab_size)


def _load_source(
    config: DataConfig, vocab_size: int, find_tokenizer: _FindTokenizer, on_progress: OnProgress
) -> CorpusSource:
    match config.source:
        case "stdlib":
            loaded = _load_stdlib(find_tokenizer())
        case "bin":
            loaded = _load_bin(config, vocab_size, find_tokenizer, on_progress)
        case "trees":
            loaded = _load_trees(config, find_tokenizer, on_progress)
        case "chats":
            loaded = _load_chats(config, find_tokenizer, on_progress)
        case _:
            loaded = _load_text(config, find_tokenizer, on_progress)
    tokenizer, tokenized, validation_tokenized = loaded
    train, validation, digests = _split(config, tokenized, validation_tokenized, on_progress)
    for documents, what in ((train, "train on"), (validation, "validate with")):
        if not documents.num_tokens:
            raise DataError(
                f"data.source={config.source!r}: no token to {what} follows another, as the documents have one token "
                "each and no token begins or ends them; add text, or set data.end_of_document_token"
            )
    # The digests tell the tokens, so the library version in the tokenizer's identity is left out on purpose.
    begin, end = tokenizer.delimiters
    # Most documents begin with the token that ends them. It was once said only here that they do.
    known = [config.source, tokenizer.vocab_size, end, *digests, *(() if begin == end else [begin])]
    return CorpusSource(
        source=config.source,
        tokenizer=tokenizer,
        train=train,
        validation=validation,
        fingerprint=hashlib.sha256(json.dumps(known).encode()).hexdigest(),
    )


def _load_stdlib(tokenizer: Tokenizer) -> _Loaded:
    digest, texts = hashlib.sha256(), []
    for relative, path in find_stdlib_files():
        [text] = read_text(path)
        digest.update(f"{relative}\0{len(text)}\0".encode() + text)
        texts.append((text, document_hash(relative.encode())))
    if not texts:
        raise DataError(
            f"data.source='stdlib': this Python has no .py files under {sysconfig.get_paths()['stdlib']}; "
            "install its library's sources, or set data.source and data.files"
        )
    chunks, tables = zip(*encode_documents(texts, tokenizer), strict=True)
    tokens = np.concatenate(chunks)
    documents = Documents((tokens,), np.concatenate(tables), tokenizer.delimiters)
    digest.update(tokens.data)
    return tokenizer, TokenizedFiles(documents, digest.hexdigest()), None


def _load_trees(config: DataConfig, find_tokenizer: _FindTokenizer, on_progress: OnProgress) -> _Loaded:
    def tokenize(files: tuple[Path, ...]) -> TokenizedFiles:
        return tokenize_trees(files, tokenizer, cache, on_progress)

    files, validation_files = _find_files(config)
    tokenizer, cache = find_tokenizer(), _token_cache(config, on_progress)
    return tokenizer, tokenize(files), tokenize(validation_files) if validation_files else None


def _load_chats(config: DataConfig, find_tokenizer: _FindTokenizer, on_progress: OnProgress) -> _Loaded:
    files, validation_files = _find_files(config)
    tokenizer, cache = find_tokenizer(), _token_cache(config, on_progress)
    chats = ChatTokenizer(config.chat, tokenizer)
    train, validation = (
        chats.tokenize(group, cache, on_progress) if group else None for group in (files, validation_files)
    )
    assert train is not None, "the config names files"
    return tokenizer, train, validation


def _load_text(config: DataConfig, find_tokenizer: _FindTokenizer, on_progress: OnProgress) -> _Loaded:
    files, validation_files = _find_files(config)
    tokenizer = find_tokenizer()
    cache = _token_cache(config, on_progress)

    def tokenize(files: tuple[Path, ...]) -> TokenizedFiles:
        return tokenize_files(files, config.source, config.text_field, tokenizer, cache, on_progress)

    return tokenizer, tokenize(files), tokenize(validation_files) if validation_files else None


def _load_bin(config: DataConfig, vocab_size: int, find_tokenizer: _FindTokenizer, on_progress: OnProgress) -> _Loaded:
    files, validation_files = _find_files(config)
    named = None if config.tokenizer is None else find_tokenizer()
    is_assumed = named is None and config.end_of_document_token is None
    delimiters = _bin_delimiters(config, files + validation_files) if named is None else named.delimiters
    cache = _token_cache(config, on_progress)

    def open_files(files: tuple[Path, ...]) -> BinFiles:
        opened = open_bin_files(files, delimiters, cache, on_progress)
        check_ids(files, opened, vocab_size, f"Set model.vocab_size to at least {max(opened.largest_ids) + 1}")
        if named is not None:
            check_ids(files, opened, named.vocab_size, f"data.tokenizer={named.name} did not make this file")
        return opened

    opened = [open_files(group) for group in (files, validation_files) if group]
    if is_assumed and not any(each.has_delimiters for each in opened):
        on_progress(
            f"no token {delimiters.end} ends a document in data.files: each is trained on as one text, without a token "
            "to end it (data.end_of_document_token)"
        )
        delimiters = Delimiters(None if config.begin_of_document_token is None else delimiters.begin, None)
        opened = [
            dataclasses.replace(each, documents=dataclasses.replace(each.documents, delimiters=delimiters))
            for each in opened
        ]
    if beyond := [token for token in delimiters.ids if not 0 <= token < vocab_size]:
        raise DataError(
            f"{files[0]}: the token {beyond[0]} that begins or ends its documents is outside the vocabulary of "
            f"{vocab_size:,}; set model.vocab_size to at least {beyond[0] + 1}, or data.end_of_document_token to "
            "another id or to none"
        )
    if named is None:
        largest_ids = [largest for each in opened for largest in each.largest_ids]
        named = PretokenizedIds(max(*largest_ids, *delimiters.ids, 0) + 1, delimiters)
    return named, opened[0], opened[1] if validation_files else None


def _bin_delimiters(config: DataConfig, files: tuple[Path, ...]) -> Delimiters:
    """The tokens that begin and end the documents of files whose tokenizer isn't known."""

    def find(which: str, token: int | str | None, otherwise: Callable[[], int | None]) -> int | None:
        if isinstance(token, str) and token != NONE:
            raise DataError(
                f"data.{which}_of_document_token={token!r} is text, which a .bin file does not know; "
                "give its id, or set data.tokenizer"
            )
        return otherwise() if token is None else token if isinstance(token, int) else None

    end = find("end", config.end_of_document_token, lambda: default_end_of_document_id(files))
    return Delimiters(find("begin", config.begin_of_document_token, lambda: end), end)


def _token_cache(config: DataConfig, on_progress: OnProgress) -> TokenCache:
    return TokenCache(Path(config.token_cache_dir), config.token_cache_gib * 2**30, on_progress)


def _load_tokenizer(config: DataConfig, vocab_size: int) -> Tokenizer:
    tokenizer = load_tokenizer(config.tokenizer or "byte", config.end_of_document_token, config.begin_of_document_token)
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"data.tokenizer={tokenizer.name} has {tokenizer.vocab_size:,} ids, more than "
            f"model.vocab_size={vocab_size:,}; set model.vocab_size to at least {tokenizer.vocab_size}"
        )
    return tokenizer


def _find_files(config: DataConfig) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    files = find_files(config.files, field="data.files")
    validation_files = find_files(config.validation_files, field="data.validation_files")
    seen = {path.resolve() for path in files}
    if both := [path for path in validation_files if path.resolve() in seen]:
        raise DataError(
            f"{both[0]} is in data.files and in data.validation_files ({len(both)} such); "
            "validation must be unseen, so leave it out of one"
        )
    return files, validation_files


def _split(
    config: DataConfig, tokenized: TokenizedFiles, validation: TokenizedFiles | None, on_progress: OnProgress
) -> tuple[Documents, Documents, tuple[str, ...]]:
    """Training documents, validation documents, and the digests that both follow from."""
    if validation is not None:
        return tokenized.documents, validation.documents, (tokenized.digest, validation.digest)
    documents, fraction = tokenized.documents, config.validation_fraction
    digests = (tokenized.digest, repr(fraction))
    noun = _noun_of(documents)
    if len(documents) == 1 and noun != "document":
        raise DataError(
            f"{documents.place_of(0)}: the only {noun} can't be both trained on and validated with; add {noun}s, or "
            "set data.validation_files"
        )
    if len(documents) == 1:
        on_progress(f"there is one document: its last {fraction:.3%} are held out for validation")
        return *_cut_in_two(documents, fraction, config.source), digests
    hashes = documents.table["hash"]
    held_out = hashes < np.uint64(int(fraction * 2**64))
    if held_out.all() or not held_out.any():
        # With few documents the hash may hold out none or all. Then the one nearest to the limit changes sides.
        few = "all" if held_out.all() else "none"
        held_out = hashes < hashes.max() if held_out.all() else hashes == hashes.min()
        on_progress(
            f"data.validation_fraction={fraction:.3g} means {few} of {len(documents)} documents, by their hashes; "
            f"held out for validation instead: {int(held_out.sum())}"
        )
    if held_out.all() or not held_out.any():
        same = "trees have the same prompt" if noun == "tree" else f"{noun}s are the same text"
        raise DataError(
            f"data.source={config.source!r}: all {len(documents)} {same}, so none of them would "
            "be new to the model; add documents, or set data.validation_files"
        )
    return documents.select(~held_out), documents.select(held_out), digests


def _noun_of(documents: Documents) -> str:
    return "tree" if isinstance(documents, Trees) else "chat" if documents.chats else "document"


def _cut_in_two(documents: Documents, fraction: float, source: str) -> tuple[Documents, Documents]:
    """The first part of a single document, and its last."""
    length = int(documents.table["length"][0])
    least = max(1, 2 - (int(documents.num_targets[0]) - length + 1))  # tokens that have a target
    if length < 2 * least:
        raise DataError(
            f"data.source={source!r}: the only document has {length} tokens, too few to train on and to validate with; "
            "add documents"
        )
    held_out = min(max(round(length * fraction), least), length - least)
    table = documents.table.repeat(2)
    table["start"][1] += length - held_out
    table["length"] = length - held_out, held_out
    table["num_bytes"] = -1  # the cut may lie within a character
    first, last = (Documents(documents.arrays, table[part : part + 1], documents.delimiters) for part in (0, 1))
    return first, last
