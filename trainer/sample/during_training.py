"""Texts that a model in training is asked for at each evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from kernels.backends import Task
from layers import GPT
from layers.generator import Generator, SampleRequest
from layers.lora import merge_adapters
from trainer.config import TrainConfig
from trainer.data import Tokenizer
from trainer.errors import UserMistake
from trainer.sample.text import added_text, check_backends, encode_prompt
from trainer.step.sharding import on_one_device


class Samples:
    """Continues `samples.prompts`; touches no device before the first time.

    Args:
      config: the experiment, with prompts.
      tokenizer: the corpus's.

    Raises:
      UserMistake: a prompt is longer than a sequence.
    """

    def __init__(self, config: TrainConfig, tokenizer: Tokenizer):
        samples, length = config.samples, config.sequence_length
        self._prompts, self._tokenizer = samples.prompts, tokenizer
        self._requests = []
        for index, prompt in enumerate(samples.prompts):
            tokens = encode_prompt(prompt, tokenizer, length)
            if len(tokens) > length:
                raise UserMistake(
                    f"samples.prompts[{index}] has {len(tokens):,} tokens, more than sequence_length={length}; "
                    "shorten it"
                )
            num_new_tokens = min(samples.num_tokens, length - len(tokens) + 1)
            self._requests.append(SampleRequest(tokens, num_new_tokens, samples.seed, tokenizer.delimiters.end))
        self._choice = samples
        generator = Generator(GPT, config.model, vocab_size=tokenizer.vocab_size)
        self._generator = generator
        self._lay_out = jax.jit(lambda params: generator.lay_out(merge_adapters(config.lora, params)))

    def check(self) -> None:
        """Checks that the backends that the config names serve the prompts; looks at the devices.

        Raises:
          UserMistake: one doesn't.
        """
        settings: dict[Task, str] = {"attention": "model.implementation", "decoding": "model.decode_implementation"}
        check_backends(self._generator, self._requests, self._choice, settings)

    def write(self, params: Any, mesh: jax.sharding.Mesh) -> Iterator[tuple[str, str]]:
        """Continues the prompts.

        Args:
          params: of the model, on the mesh, with adapters if it has them.
          mesh: they are gathered on each of its devices for the while, in the compute dtype.

        Returns:
          Each prompt and what the model makes of it.
        """
        laid_out = on_one_device(self._lay_out(params), mesh)
        added: list[list[int]] = [[] for _ in self._requests]
        for new in self._generator.generate(laid_out, self._requests, self._choice):
            if new.token != self._tokenizer.delimiters.end:
                added[new.request].append(new.token)
        prompts = (request.tokens for request in self._requests)
        texts = [added_text(*each, self._tokenizer) for each in zip(prompts, added, strict=True)]
        return zip(self._prompts, texts, strict=True)
