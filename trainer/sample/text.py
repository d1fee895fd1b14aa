"""Texts that somebody asks for: the prompts as tokens, the backends that serve them, and what a model adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kernels import CantServe
from kernels.backends import Task
from layers.generator import Generator, SampleRequest
from layers.token_choice import TokenChoice
from trainer.data import Tokenizer
from trainer.errors import UserMistake


def encode_prompt(text: str, tokenizer: Tokenizer, context_length: int) -> tuple[int, ...]:
    """Tokens of a prompt, as training would have them.

    A document begins with a token of its own, or with the one that ends the one before; only a piece that fills the
    context, cut from a longer document, may do without.

    Args:
      text: the prompt.
      tokenizer: training's.
      context_length: tokens that the model can attend to.

    Returns:
      At least one token. More than the context holds, if the prompt is that long.

    Raises:
      UserMistake: the prompt has no token, and no token begins a document.
    """
    tokens = tuple(tokenizer.encode(text))
    begin = tokenizer.delimiters.begin
    if begin is None or len(tokens) >= context_length:
        if not tokens:
            raise UserMistake(f"the prompt {text!r} has no token to begin with, nor have documents; give some text")
        return tokens
    return (begin, *tokens)


def added_text(prompt: Sequence[int], added: Sequence[int], tokenizer: Tokenizer) -> str:
    """The text that tokens add to a prompt's: some tokenizers write a word's space depending on what precedes it.

    >>> from trainer.data import ByteTokenizer
    >>> added_text(list(b"na"), list("ïve".encode()), ByteTokenizer())
    'ïve'
    """
    return tokenizer.decode([*prompt, *added])[len(tokenizer.decode(prompt)) :]


def check_backends(
    generator: Generator, requests: Sequence[SampleRequest], choice: TokenChoice, settings: Mapping[Task, str]
) -> None:
    """Raises UserMistake where they don't, with the setting to change; needs no parameters.

    Args:
      generator: of the model.
      requests: the texts.
      choice: how tokens are chosen.
      settings: what a user calls the choice of a backend for prompts ("attention") and for new tokens ("decoding").
    """
    try:
        generator.check(requests, choice)
    except CantServe as refused:
        raise UserMistake(
            f"{settings[refused.task]}={refused.implementation!r} can't serve this call: {refused.reason}; "
            "choose another, or None for the fastest that can"
        ) from refused
