"""Greedy answers to many questions about one context, whose keys and values are computed once and shared.

The context is read into one sequence of unified caches (`kernels.UnifiedCache`), in the attention of training. All
other sequences then begin with its tokens, which stay where they are, and each gets a question. A step reads the
context's slots once for all questions.

Shapes: Z questions that are answered side by side, P tokens of a question and its padding, L tokens of the longest
context, C slots of a layer's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Int32

from kernels import SlotTable, UnifiedCache
from kernels.decode.blocks import DEFAULT_BLOCK_SIZE
from layers import GPT, GPTConfig
from layers.decoding import unroll_params, unrolled_config

_PROMPT_MULTIPLE = 16
# A shared prefix of many blocks is rounded down to a multiple, which divides into parts for a GPU's multiprocessors.
_BLOCKS_MULTIPLE, _FEW_BLOCKS = 16, 128

_Slabs = tuple[tuple[Float[Array, "C K H"], Float[Array, "C K V"]], ...]


class ContextDecoder:
    """Answers questions about contexts, on one device; nothing is compiled before the first.

    Args:
      config: of the model.
      length: L.
      shortest: tokens of the shortest context. Up to these a context is read once for all questions.
      num_questions: Z; more are answered in several goes.
      longest_prompt: tokens of the longest question.
      longest_answer: tokens of an answer at most.
      vocab_size: the tokenizer's.

    Raises:
      ValueError: a mask of the model looks ahead.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        length: int,
        shortest: int,
        num_questions: int,
        longest_prompt: int,
        longest_answer: int,
        vocab_size: int,
    ):
        config.check_looks_back_only()
        self._config, self._length, self._num_questions = config, length, num_questions
        self._num_new, self._vocab_size = longest_answer, vocab_size
        self._prompt_length = -(-longest_prompt // _PROMPT_MULTIPLE) * _PROMPT_MULTIPLE
        block = DEFAULT_BLOCK_SIZE
        num_blocks = shortest // block
        num_blocks -= num_blocks % _BLOCKS_MULTIPLE if num_blocks >= _FEW_BLOCKS else 0
        self._num_shared = num_blocks * block
        own_blocks = -(-(longest_prompt + longest_answer) // block)
        self._capacity = (-(-length // block) + num_questions * own_blocks) * block
        laid_out = nnx.eval_shape(lambda: GPT(unrolled_config(config), rngs=nnx.Rngs(0)))
        self._graphdef = nnx.split(laid_out, nnx.Param)[0]
        self._read = jax.jit(self._read_context)
        self._continue = jax.jit(self._add_tokens, donate_argnums=2)
        self._lay_out = jax.jit(lambda params: unroll_params(config, params))

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values of all layers."""
        slabs = jax.eval_shape(self._empty_slabs)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(slabs))

    def lay_out(self, params: Any) -> Any:
        """The model's parameters as `answer` wants them: layer by layer, matrices in the compute dtype."""
        return self._lay_out(params)

    def answer(
        self,
        params: Any,
        context: Int32[np.ndarray, " C"],
        prompts: Sequence[Int32[np.ndarray, " P"]],
        is_whole: Callable[[int, list[int]], bool] = lambda question, answer: False,
    ) -> list[list[int]]:
        """The likeliest tokens after each question, one by one.

        Args:
          params: from `lay_out`.
          context: what all questions are about.
          prompts: the questions, any number of them, each of a token at least.
          is_whole: (number of the question, its answer so far) → True where no more tokens are wanted. It hears of each
            token a step late, so that the device doesn't wait for the host.

        Returns:
          For each question at most `longest_answer` tokens.
        """
        tokens = np.zeros((1, self._length), np.int32)
        tokens[0, : len(context)] = context
        table, slabs = self._read(params, tokens, np.array([len(context)], np.int32))
        answers: list[list[int]] = []
        for start in range(0, len(prompts), self._num_questions):
            group = prompts[start : start + self._num_questions]
            slabs = self._answer_group(params, table, slabs, group, answers, is_whole)
        return answers

    def _answer_group(self, params, table, slabs, prompts, answers, is_whole) -> _Slabs:
        """Adds the answers to some questions. Their tokens replace those of the questions before, which the table of
        the context doesn't know."""
        tokens = np.zeros((self._num_questions, self._prompt_length), np.int32)
        counts = np.zeros(self._num_questions, np.int32)
        for index, prompt in enumerate(prompts):
            tokens[index, : len(prompt)], counts[index] = prompt, len(prompt)
        first, is_open = len(answers), np.ones(len(prompts), bool)
        answers += [[] for _ in prompts]
        newest, table, slabs = self._continue(params, table, slabs, tokens, counts)
        for number in range(self._num_new):
            added = newest
            if number < self._num_new - 1:
                newest, table, slabs = self._continue(params, table, slabs, added[:, None], np.minimum(counts, 1))
            on_host = np.asarray(added)
            for index in np.flatnonzero(is_open).tolist():
                answers[first + index].append(int(on_host[index]))
                is_open[index] = not is_whole(first + index, answers[first + index])
            if not is_open.any():
                break
        return slabs

    def _empty_slabs(self) -> _Slabs:
        layers = map(self._config.layer, range(self._config.num_layers))
        caches = [
            UnifiedCache.empty(1, self._capacity, layer.num_kv_heads, layer.head_dim, dtype=self._config.compute_dtype)
            for layer in layers
        ]
        return tuple((cache.key, cache.value) for cache in caches)

    def _read_context(
        self, params: Any, tokens: Int[Array, "1 L"], num_tokens: Int[Array, " 1"]
    ) -> tuple[SlotTable, _Slabs]:
        """Reads a context for all sequences."""
        model: Any = nnx.merge(self._graphdef, params)
        table = SlotTable.empty(self._num_questions, self._capacity)
        _, caches = model.prefill(
            tokens,
            _caches(table, self._empty_slabs()),
            sequences=jnp.zeros(1, jnp.int32),
            num_tokens=num_tokens,
            context_length=self._length,
        )
        return caches[0].table.share_with_all(0, self._num_shared), _slabs(caches)

    def _add_tokens(
        self, params: Any, table: SlotTable, slabs: _Slabs, tokens: Int[Array, "Z P"], counts: Int[Array, " Z"]
    ) -> tuple[Int[Array, " Z"], SlotTable, _Slabs]:
        """Adds tokens to all sequences, and returns the likeliest one to follow in each."""
        model: Any = nnx.merge(self._graphdef, params)
        hidden, caches = model.decode(tokens, _caches(table, slabs), num_tokens=counts, context_length=self._length)
        last = jnp.take_along_axis(hidden, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)[:, 0]
        newest = model.logits(last)[:, : self._vocab_size].argmax(-1).astype(jnp.int32)
        return newest, caches[0].table, _slabs(caches)


def _caches(table: SlotTable, slabs: _Slabs) -> Any:
    # All layers write the same tokens: with one table for all of them, XLA computes it once.
    return tuple(UnifiedCache(key, value, table) for key, value in slabs)


def _slabs(caches: Sequence[UnifiedCache]) -> _Slabs:
    return tuple((cache.key, cache.value) for cache in caches)
