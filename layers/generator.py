"""Prompts in, tokens out: each prompt at once, then a token of every text at a time, through the model's caches.

Shapes: B texts written side by side, T tokens of a prompt and its padding, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, UInt32

from kernels import SlabCache
from layers.config import GPTConfig
from layers.decoding import init_caches, unroll_params, unrolled_config
from layers.token_choice import TokenChoice, choose_tokens

# Prompts are padded to a power of two, this one or a larger, and caches to a multiple, so that other prompts seldom
# mean another program to compile.
_SHORTEST_PROMPT = 64
_CACHE_MULTIPLE = 256
_NO_TOKEN = -1


@dataclass(frozen=True)
class SampleRequest:
    """A text to be continued."""

    tokens: tuple[int, ...]
    """The prompt's, at least one."""
    num_new_tokens: int
    """Tokens to add at most, at least one."""
    seed: int
    """Seed of the random choices. Prompt and seed alone determine a text, whatever is written beside it."""
    stop_token: int | None
    """Ends the text; None: its length alone does."""


class NewToken(NamedTuple):
    """A token that was added to a text."""

    request: int
    """Index of the text."""
    token: int
    is_last: bool
    """True if the text ends here: this is the stop token, or it has its number of tokens."""


class _Texts(NamedTuple):
    """The texts in the making, on the device."""

    caches: tuple[SlabCache, ...]
    newest: Int[Array, " B"]
    """The last token of each, which isn't in the caches yet."""
    num_left: Int[Array, " B"]
    """Tokens that each is still to get."""
    seeds: UInt32[Array, " B"]
    stop_tokens: Int[Array, " B"]


class _Added(NamedTuple):
    """Tokens that a program has added, for the host to read while the next one runs."""

    requests: Int[Array, " B"]
    tokens: Int[Array, " B"]
    is_new: Bool[Array, " B"]
    is_last: Bool[Array, " B"]


class Generator:
    """Continues texts with a model, on one device; nothing is compiled before the first.

    Args:
      model_class: `layers.GPT`, which is given and not imported, since its own `generate` makes a generator.
      config: of the model.
      vocab_size: the tokenizer's; a model often has room for more ids, which mean nothing.

    Raises:
      ValueError: a mask of the model looks ahead.
    """

    def __init__(self, model_class: Callable[..., Any], config: GPTConfig, *, vocab_size: int):
        config.check_looks_back_only()
        self._config = config
        laid_out = nnx.eval_shape(lambda: model_class(unrolled_config(config), rngs=nnx.Rngs(0)))
        self._graphdef, self._abstract_params = nnx.split(laid_out, nnx.Param)
        self._vocab_size = vocab_size
        self.lay_out = jax.jit(lambda params: unroll_params(config, params))
        """The model's parameters, on one device, as `generate` wants them; the given ones aren't needed any more."""
        self._begin = jax.jit(self._begin_text, donate_argnums=1, static_argnames="context_length")
        self._step = jax.jit(self._add_tokens, donate_argnums=1, static_argnames="context_length")

    def check(self, requests: Sequence[SampleRequest], choice: TokenChoice) -> None:
        """Checks that the backends that the model's config names serve these texts; needs no parameters.

        Raises:
          CantServe: a backend doesn't.
        """
        if self._config.implementation is None and self._config.decode_implementation is None:
            return  # Something serves every call.
        params = nnx.to_pure_dict(self._abstract_params)
        texts, context_length = jax.eval_shape(lambda: self._no_texts(requests)), _context_length(requests)
        for prompt in _prompts(requests):
            self._begin.eval_shape(params, texts, *prompt, _numbers(choice), context_length=context_length)
        self._step.eval_shape(params, texts, _numbers(choice), context_length=context_length)

    def generate(self, params: Any, requests: Sequence[SampleRequest], choice: TokenChoice) -> Iterator[NewToken]:
        """Continues texts side by side, until all have ended.

        Args:
          params: from `lay_out`.
          requests: at least one, of any lengths.
          choice: how tokens are chosen.

        Returns:
          Every token as soon as it is chosen.
        """
        num_ended = 0
        programs = self._run(params, requests, _numbers(choice))
        added = next(programs)
        while num_ended < len(requests):
            following = next(programs)  # The device has it before the host waits for what came before.
            for request, token, is_new, is_last in zip(*jax.device_get(added), strict=True):
                if is_new:
                    num_ended += bool(is_last)
                    yield NewToken(int(request), int(token), bool(is_last))
            added = following

    def cache_bytes(self, requests: Sequence[SampleRequest]) -> int:
        """Bytes that the caches of these texts take on the device."""
        caches = jax.eval_shape(lambda: self._no_caches(requests))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(caches))

    def _run(self, params: Any, requests: Sequence[SampleRequest], choice: dict[str, float | None]) -> Iterator[_Added]:
        """Starts one program after another, without an end, and yields what each is going to add."""
        texts, context_length = self._no_texts(requests), _context_length(requests)
        for prompt in _prompts(requests):
            texts, added = self._begin(params, texts, *prompt, choice, context_length=context_length)
            yield added
        while True:
            texts, added = self._step(params, texts, choice, context_length=context_length)
            yield added

    def _no_texts(self, requests: Sequence[SampleRequest]) -> _Texts:
        return _Texts(
            caches=self._no_caches(requests),
            newest=jnp.zeros(len(requests), jnp.int32),
            num_left=jnp.zeros(len(requests), jnp.int32),
            seeds=jnp.array([_text_seed(request) for request in requests], jnp.uint32),
            stop_tokens=jnp.array(
                [_NO_TOKEN if request.stop_token is None else request.stop_token for request in requests], jnp.int32
            ),
        )

    def _no_caches(self, requests: Sequence[SampleRequest]) -> tuple[SlabCache, ...]:
        return init_caches(self._config, len(requests), _context_length(requests))

    def _begin_text(
        self,
        params: Any,
        texts: _Texts,
        tokens: Int[Array, "1 T"],
        num_tokens: Int[Array, ""],
        index: Int[Array, ""],
        num_new_tokens: Int[Array, ""],
        choice: dict[str, Array],
        *,
        context_length: int,
    ) -> tuple[_Texts, _Added]:
        """Reads a prompt and chooses what comes after it."""
        model = nnx.merge(self._graphdef, params)
        hidden, caches = model.prefill(
            tokens,
            texts.caches,
            sequences=index[None],
            num_tokens=num_tokens[None],
            context_length=context_length,
        )
        chosen = self._choose(model, hidden[:, num_tokens - 1], texts.seeds[index][None], num_tokens[None], choice)
        num_left = jnp.where(chosen == texts.stop_tokens[index], 0, num_new_tokens - 1)
        texts = texts._replace(
            caches=caches,
            newest=texts.newest.at[index].set(chosen[0]),
            num_left=texts.num_left.at[index].set(num_left[0]),
        )
        return texts, _Added(index[None], chosen, jnp.ones(1, bool), num_left == 0)

    def _add_tokens(
        self, params: Any, texts: _Texts, choice: dict[str, Array], *, context_length: int
    ) -> tuple[_Texts, _Added]:
        """Adds a token to each text that hasn't ended."""
        model = nnx.merge(self._graphdef, params)
        is_new = texts.num_left > 0
        hidden, caches = model.decode(
            texts.newest[:, None],
            texts.caches,
            num_tokens=is_new.astype(jnp.int32),
            context_length=context_length,
        )
        chosen = self._choose(model, hidden[:, 0], texts.seeds, caches[0].lengths, choice)
        num_left = jnp.where(is_new & (chosen != texts.stop_tokens), texts.num_left - 1, 0)
        added = _Added(jnp.arange(len(chosen)), chosen, is_new, num_left == 0)
        return texts._replace(caches=caches, newest=chosen, num_left=num_left), added

    def _choose(
        self,
        model: Any,
        hidden: Float[Array, "B W"],
        seeds: UInt32[Array, " B"],
        positions: Int[Array, " B"],
        choice: dict[str, Array],
    ) -> Int[Array, " B"]:
        # From the text's own seed and the token's position, so that no text depends on another.
        keys = jax.vmap(lambda seed, position: jax.random.fold_in(jax.random.key(seed), position))(seeds, positions)
        return choose_tokens(model.logits(hidden)[:, : self._vocab_size], keys, **choice)


@functools.lru_cache(maxsize=8)
def generator_of(model_class: Callable[..., Any], config: GPTConfig, vocab_size: int) -> Generator:
    """The generator for all models of a config: its programs are compiled once."""
    return Generator(model_class, config, vocab_size=vocab_size)


def make_requests(
    prompts: Sequence[Sequence[int]], num_tokens: int, *, seed: int, stop_token: int | None, vocab_size: int
) -> list[SampleRequest]:
    """One request for each prompt, with seeds that count up; ValueError, as `GPT.generate` says."""
    if not all(np.ndim(prompt) == 1 and len(prompt) for prompt in prompts):
        raise ValueError(
            "prompts must be lists of token ids, one for each text, with a token at least (one that begins a document "
            f"will do), got {str(prompts)[:80]!r}; a single prompt is [prompt]"
        )
    if not len(prompts) or num_tokens < 1:
        raise ValueError(f"there must be a prompt and a token to add, got {len(prompts)} and num_tokens={num_tokens}")
    ids = [np.asarray(prompt) for prompt in prompts]
    if not all(x.dtype.kind in "iu" and x.min() >= 0 and x.max() < vocab_size for x in ids):
        raise ValueError(f"prompts must hold integers from 0 to vocab_size - 1 = {vocab_size - 1}")
    stop = -1 if stop_token is None else stop_token
    return [SampleRequest(tuple(x.tolist()), num_tokens, seed + i, stop) for i, x in enumerate(ids)]


def _numbers(choice: TokenChoice) -> dict[str, float | None]:
    # Arguments of the programs: the presence of a number is compiled in, its value isn't.
    return {"temperature": choice.temperature or None, "top_k": choice.top_k, "top_p": choice.top_p}


def _context_length(requests: Sequence[SampleRequest]) -> int:
    """Tokens that the caches are made for; rounded up, so that texts of about one length share programs."""
    # The last token of a text needs no slot.
    longest = max(len(request.tokens) + request.num_new_tokens - 1 for request in requests)
    return -(-longest // _CACHE_MULTIPLE) * _CACHE_MULTIPLE


def _prompts(requests: Sequence[SampleRequest]) -> Iterator[tuple[Int[np.ndarray, "1 T"], int, int, int]]:
    """For each text: the prompt's tokens and padding, its length, the text's index and the number of tokens to add."""
    for index, request in enumerate(requests):
        # One by one: a prompt is never padded to another's length.
        tokens = np.zeros((1, _padded_length(len(request.tokens))), np.int32)
        tokens[0, : len(request.tokens)] = request.tokens
        yield tokens, len(request.tokens), index, request.num_new_tokens


def _text_seed(request: SampleRequest) -> int:
    # From the prompt as well: with the same draws, texts of an unsure model soon agree whatever they began with.
    return int(np.random.SeedSequence([request.seed, *request.tokens]).generate_state(1)[0])


def _padded_length(length: int) -> int:
    """The next power of two.

    >>> [_padded_length(length) for length in (1, 64, 65, 32_768)]
    [64, 64, 128, 32768]
    """
    return max(_SHORTEST_PROMPT, 1 << (length - 1).bit_length())
