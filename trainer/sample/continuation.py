"""From an understood command line to texts on the terminal."""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp

from kernels.backends import Task
from layers import GPT
from layers.generator import Generator, NewToken, SampleRequest
from trainer.compile.out_of_memory import OutOfMemory, describe_device, describe_host, running
from trainer.compile.persistent_cache import use_compilation_cache
from trainer.config import MeshConfig
from trainer.data import Tokenizer
from trainer.data.files import read_at_most
from trainer.errors import TrainingFailed, UserMistake
from trainer.sample.sample_command import SampleCommand
from trainer.sample.text import added_text, check_backends, encode_prompt
from trainer.sample.trained_run import TrainedRun, open_run
from trainer.step.sharding import make_mesh
from trainer.terminal.console import Console
from trainer.terminal.streams import visible
from trainer.terminal.units import format_bytes, format_count, format_seconds

_DEFAULT_NUM_TOKENS = 256
# The longest tokens that tokenizers have, runs of spaces, stand for fewer bytes.
_MAX_BYTES_PER_TOKEN = 256
# A long prompt's beginning is left out where the texts are shown.
_NUM_SHOWN_CHARACTERS = 400


def run(command: SampleCommand) -> None:
    """Continues the prompts of a command.

    Raises:
      UserMistake: a checkpoint is missing, the tokenizer differs from training's, a text doesn't fit the context, or an
        attention backend that was named can't serve it.
      TrainingFailed: a checkpoint is damaged, the devices can't be started, or one or this machine is out of memory.
    """
    console = Console(sys.stderr)
    trained = open_run(
        command.workdir, step=command.step, tokenizer=command.tokenizer, implementations=command.implementations
    )
    for damaged in trained.checkpoint.damaged:
        console.warning(f"{damaged}; the one before it is taken")
    prompts, requests = _plan(command, trained)

    use_compilation_cache(trained.config.compilation.cache_dir)
    device = make_mesh(MeshConfig()).devices.flat[0]
    generator = Generator(GPT, trained.model, vocab_size=trained.tokenizer.vocab_size)
    settings: dict[Task, str] = {"attention": "--implementation", "decoding": "--decode-implementation"}
    check_backends(generator, requests, command.choice, settings)
    with _explained(requests, trained, device, generator):
        restored = trained.restore_params(device)
        params = generator.lay_out(restored)
    console.note(
        f"{trained.config.name} at step {trained.checkpoint.step}: {format_count(trained.model.num_parameters)} "
        f"parameters, {trained.tokenizer.name} tokenizer, context of {trained.config.sequence_length:,} tokens, "
        f"{device.device_kind}"
    )
    begun = time.perf_counter()
    with _explained(requests, trained, device, generator):
        num_added, num_ended = _show(
            generator.generate(params, requests, command.choice), prompts, requests, trained.tokenizer
        )
    console.note(
        f"tokens added: {num_added:,} in {format_seconds(time.perf_counter() - begun)}, compiling included; "
        f"texts that ended by themselves: {num_ended} of {len(requests)}"
    )


@contextlib.contextmanager
def _explained(
    requests: Sequence[SampleRequest], trained: TrainedRun, device: jax.Device, generator: Generator
) -> Iterator[None]:
    """Ends sampling with a message where the device, or this machine, is out of memory."""
    try:
        with running("sampling"):
            yield
    except OutOfMemory as error:
        longest = max(len(request.tokens) + request.num_new_tokens for request in requests)
        model, caches = trained.model, format_bytes(generator.cache_bytes(requests))
        parameters = model.num_parameters * jnp.dtype(model.compute_dtype).itemsize
        raise TrainingFailed(
            f"sampling: out of memory on {'this machine' if error.on_host else device.device_kind}: {error.reason}\n"
            f"  it needs {format_bytes(parameters)} for the parameters in {model.compute_dtype}, after "
            f"{format_bytes(model.num_parameters * 4)} for them as saved; {caches} for the caches of {len(requests)} "
            f"text(s) of up to {longest:,} tokens, the one that begins a document included; and a prompt's own\n"
            f"  {describe_host() if error.on_host else describe_device(device, 1)}\n"
            "  what helps: fewer prompts or seeds at a time, shorter prompts, or a smaller --num-tokens"
        ) from error


def _show(
    tokens: Iterator[NewToken], prompts: Sequence[str], requests: Sequence[SampleRequest], tokenizer: Tokenizer
) -> tuple[int, int]:
    """Writes each text once it is whole, several under their numbers.

    Returns:
      How many tokens were added, and how many texts ended by themselves.
    """
    added: list[list[int]] = [[] for _ in requests]
    num_added = num_ended = 0
    for new in tokens:
        request, prompt = requests[new.request], prompts[new.request]
        num_added += 1
        if new.token == request.stop_token:
            num_ended += 1
        else:
            added[new.request].append(new.token)
        if new.is_last:
            shown = prompt if len(prompt) <= _NUM_SHOWN_CHARACTERS else f"…{prompt[-_NUM_SHOWN_CHARACTERS:]}"
            text = shown + added_text(request.tokens, added[new.request], tokenizer)
            text = f"{text}\n" if len(requests) == 1 else f"[{new.request + 1}]\n{text}\n\n"
            # A terminal must obey no control character.
            print(visible(text) if sys.stdout.isatty() else text, end="", flush=True)
    return num_added, num_ended


def _plan(command: SampleCommand, trained: TrainedRun) -> tuple[list[str], list[SampleRequest]]:
    """The prompt and the request of each text."""
    context_length, tokenizer = trained.config.sequence_length, trained.tokenizer
    prompts, requests = [], []
    for number, prompt in enumerate(_read_prompts(command, context_length), 1):
        tokens = encode_prompt(prompt, tokenizer, context_length)
        begins_document = tokens[0] == tokenizer.delimiters.begin
        num_new_tokens = _num_new_tokens(number, len(tokens), begins_document, command.num_tokens, context_length)
        for seed in command.seed:
            prompts.append(prompt)
            requests.append(SampleRequest(tokens, num_new_tokens, seed, tokenizer.delimiters.end))
    return prompts, requests


def _read_prompts(command: SampleCommand, context_length: int) -> Iterator[str]:
    yield from command.prompt
    limit = context_length * _MAX_BYTES_PER_TOKEN
    for path in command.prompt_file:
        try:
            content = read_at_most(path, limit)
            if content is None:
                raise UserMistake(
                    f"--prompt-file {path} has more than {limit:,} bytes, which is more than the context of "
                    f"{context_length:,} tokens can hold; shorten it"
                )
            # Any line end becomes \n, and a byte order mark is left out.
            yield io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig").read()
        except OSError as error:
            raise UserMistake(f"--prompt-file {path} can't be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise UserMistake(f"--prompt-file {path} is not UTF-8: {error.reason} at byte {error.start:,}") from error


def _num_new_tokens(number: int, length: int, begins_document: bool, wanted: int | None, context_length: int) -> int:
    """How many to add to a prompt's tokens. The model never met positions past the context, so these are refused."""
    limit = f"the {context_length:,} tokens that the model was trained on"
    if length > context_length:
        raise UserMistake(f"prompt {number} has {length:,} tokens, more than {limit}; shorten it")
    # Nothing attends to the last token, so it needs no slot of the cache.
    room = context_length - length + 1
    if wanted is None:
        return min(_DEFAULT_NUM_TOKENS, room)
    if wanted > room:
        begun = " and the one that begins a document" if begins_document else ""
        raise UserMistake(
            f"prompt {number} has {length - begins_document:,} tokens{begun}; --num-tokens {wanted} more would "
            f"overfill the cache, which holds {limit}; use at most --num-tokens {room}, or leave it out"
        )
    return wanted
