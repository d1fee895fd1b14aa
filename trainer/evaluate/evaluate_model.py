"""From an understood command line to lines, pictures and tables."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import jax
import numpy as np

from trainer.compile.out_of_memory import OutOfMemory, describe_device, describe_host, running
from trainer.compile.persistent_cache import use_compilation_cache
from trainer.config import MeshConfig, TrainConfig
from trainer.data import Documents, Tokenizer
from trainer.data.files import read_at_most
from trainer.errors import TrainingFailed, UserMistake
from trainer.evaluate.evaluate_command import EvaluateCommand
from trainer.evaluate.forward import TokenForward
from trainer.evaluate.losses import ChosenDocuments
from trainer.evaluate.pictures import draw_loss_by_position, draw_retrieval
from trainer.evaluate.results import FILE_NAME, Line, append_lines, describe, format_length, read_lines
from trainer.evaluate.retrieval import make_decoder, mean_scores, score_example
from trainer.evaluate.subject import Subject, find_documents, open_subject
from trainer.evaluate.tasks import NOISE, Example, make_examples
from trainer.step.sharding import make_mesh, on_one_device
from trainer.terminal.console import Console
from trainer.terminal.units import format_bytes, format_count, format_seconds

_T = TypeVar("_T")

_MAX_HAYSTACK_BYTES = 2**28


class _Work(NamedTuple):
    """All that is to be measured, read and checked before a device starts."""

    documents: Documents | None
    losses: ChosenDocuments | None
    examples: dict[int, list[Example]]
    """By length."""


def run(command: EvaluateCommand) -> None:
    """Evaluates the model of a command, adds to its file, and prints the tables.

    Raises:
      UserMistake: there is no such model, its tokenizer is unknown or another, or a length is beyond its positions.
      TrainingFailed: a checkpoint or the data is damaged, a device is out of memory, or the results can't be written.
    """
    console = Console(sys.stderr)
    subject = open_subject(command, console)
    if (warning := subject.check_lengths(command)) is not None:
        console.warning(warning)
    work = _plan(command, subject, console)
    output = command.output or command.workdir
    assert output is not None, "the command line has one of the two"
    _make_folder(output)

    use_compilation_cache(subject.config.compilation.cache_dir)
    begun = time.perf_counter()
    try:
        with running("evaluating"):
            # As they come: an end at the longest length mustn't cost what the others took.
            for step, measured in _measure(subject, work, command, console):
                lines = [dataclasses.replace(line, step=step, seed=command.seed) for line in measured]
                _written(output, functools.partial(append_lines, output / FILE_NAME, lines))
    except OutOfMemory as error:
        raise TrainingFailed(
            f"evaluating: out of memory on {'this machine' if error.on_host else 'a device'}: {error.reason}\n"
            f"  {describe_host() if error.on_host else describe_device(jax.local_devices()[0], 1)}\n"
            "  what helps: shorter --lengths, fewer --questions, or a mesh of more devices"
        ) from error
    known = [line for line in read_lines(output / FILE_NAME) if not line.digest]
    pictures = {"loss_by_position.png": draw_loss_by_position, "retrieval.png": draw_retrieval}
    drawn = [
        name for name, draw in pictures.items() if _written(output, functools.partial(draw, known, step, output / name))
    ]
    print(describe(known, step), flush=True)
    console.note(f"written to {output}: {', '.join([FILE_NAME, *drawn])}")
    console.note(f"evaluated in {format_seconds(time.perf_counter() - begun)}, compiling included")


def _plan(command: EvaluateCommand, subject: Subject, console: Console) -> _Work:
    lengths, names = command.token_lengths, command.task_names
    if names and subject.tokenizer is None:
        unknown = "the model's tokenizer is unknown, and tasks are texts; give its tokenizer.json with --tokenizer"
        if command.asks_for_tasks:
            raise UserMistake(f"--tasks {' '.join(command.tasks)}: {unknown}")
        console.note(f"no tasks: {unknown}")
        names = ()
    documents, losses = find_documents(command, subject, console), None
    if documents is None:
        if not names:
            raise UserMistake("there is nothing to evaluate: no documents and no tasks; give --files, or --tokenizer")
        console.note("no losses are measured: --files GLOB names documents for them")
    else:
        losses = ChosenDocuments.choose(documents, lengths, command.documents, command.seed)
        if left := [format_length(length) for length in lengths if length not in losses.lengths]:
            console.warning(f"no document is as long as {', '.join(left)} tokens; losses are of shorter ones")
    examples: dict[int, list[Example]] = {}
    if subject.tokenizer is not None and names:
        try:
            subject.config.model.check_looks_back_only()
        except ValueError as refused:
            raise UserMistake(f"{refused}; --tasks none measures losses alone") from refused
        haystack = NOISE if command.haystack is None else _read_haystack(command.haystack)
        make = functools.partial(_make_examples, command, subject.tokenizer, haystack)
        for length in lengths:
            for task in names:
                try:
                    examples.setdefault(length, []).extend(make(task, length))
                except UserMistake as refused:
                    if command.asks_for_tasks:
                        raise
                    console.note(f"left out: {refused}")
    if documents is None and not any(examples.values()):
        raise UserMistake(f"there is nothing to evaluate: --lengths {command.lengths} is too short for every task")
    return _Work(documents, losses, examples)


def _make_examples(
    command: EvaluateCommand, tokenizer: Tokenizer, haystack: str, task: str, length: int
) -> list[Example]:
    return make_examples(
        task,
        length,
        num_examples=command.examples * command.depths,
        num_questions=command.questions,
        depths=tuple(np.linspace(0, 1, command.depths).tolist()) if command.depths > 1 else (0.5,),
        tokenizer=tokenizer,
        haystack=haystack,
        seed=command.seed,
    )


def _read_haystack(path: Path) -> str:
    try:
        content = read_at_most(path, _MAX_HAYSTACK_BYTES)
        if content is None:
            raise UserMistake(f"--haystack {path} has more than {_MAX_HAYSTACK_BYTES:,} bytes; shorten it")
        return content.decode("utf-8-sig")
    except OSError as error:
        raise UserMistake(f"--haystack {path} can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserMistake(f"--haystack {path} is not UTF-8: {error.reason} at byte {error.start:,}") from error


def _measure(
    subject: Subject, work: _Work, command: EvaluateCommand, console: Console
) -> Iterator[tuple[int, list[Line]]]:
    """Starts the devices and measures everything: the step, with the lines of the losses, then of each length."""
    config = _on_devices_at_hand(subject, console)
    mesh = make_mesh(config.mesh)
    parts = () if work.losses is None else work.losses.parts
    forward = TokenForward(config, mesh, max((part.stop - part.start for part in parts), default=1))
    step, params = subject.load(forward.abstract_params)
    console.note(
        f"{subject.name} at step {step}: {format_count(config.model.num_parameters)} parameters, "
        f"{mesh.size} × {mesh.devices.flat[0].device_kind}"
    )
    if work.documents is not None and work.losses is not None:
        streams = work.losses.streams(work.documents)
        begun = time.perf_counter()
        nats = [losses.nats for losses in forward(params, streams)]
        num_tokens = sum(map(len, nats))
        console.note(f"losses of {num_tokens:,} tokens in {format_seconds(time.perf_counter() - begun)}")
        yield step, work.losses.bin(nats, work.losses.weights(work.documents), command.token_lengths[0])
    laid_out = None
    for length, examples in work.examples.items():
        if not examples:
            continue
        assert subject.tokenizer is not None, "without one there are no tasks"
        decoder = make_decoder(config.model, examples, subject.tokenizer)
        if laid_out is None:
            laid_out = on_one_device(decoder.lay_out(params), mesh)
            del params
        scores = []
        begun = time.perf_counter()
        for example in examples:
            scores.append(score_example(decoder, laid_out, example, subject.tokenizer))
        console.note(
            f"{format_length(length)}: {len(examples)} contexts in {format_seconds(time.perf_counter() - begun)}, "
            f"{format_bytes(decoder.cache_bytes)} of keys and values"
        )
        yield step, list(mean_scores(examples, scores))


def _on_devices_at_hand(subject: Subject, console: Console) -> TrainConfig:
    """The config, with the run's mesh if there are as many devices, and one device otherwise."""
    make_mesh(MeshConfig())  # starts the devices, or tells why they can't be
    num_needed = math.prod(dataclasses.astuple(subject.config.mesh))
    if jax.device_count() >= num_needed:
        return subject.config
    console.note(f"the run had {num_needed} devices, and here are {jax.device_count()}: one of them is used")
    return dataclasses.replace(subject.config, mesh=MeshConfig())


def _make_folder(output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserMistake(f"--output {output} can't be made: {error.strerror}; name another folder") from error


def _written(output: Path, write: Callable[[], _T]) -> _T:
    try:
        return write()
    except OSError as error:
        raise TrainingFailed(f"{output} can't be written: {error.strerror}") from error
