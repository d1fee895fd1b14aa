"""The model that is evaluated: a run's newest checkpoint, or a Hugging Face folder. Nothing is on a device yet."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from layers import LoRAConfig
from layers.pretrained import config_from_huggingface, read_params
from layers.pretrained.folder import inside, read_config
from trainer.compile.out_of_memory import reason_of
from trainer.config import OptimizerConfig, TrainConfig
from trainer.config.init_from import is_workdir
from trainer.data import Documents, Tokenizer, load_corpus, load_tokenizer
from trainer.data.files import find_files
from trainer.data.token_cache import TokenCache
from trainer.data.tokenization import tokenize_files
from trainer.errors import UserMistake
from trainer.evaluate.evaluate_command import EvaluateCommand
from trainer.files.paths import refuse_unusual
from trainer.sample.trained_run import check_tokenizer
from trainer.saved_run import load_trained_tokenizer, open_saved_run
from trainer.terminal.console import Console

_TOKENIZER_NAME = "tokenizer.json"


@dataclass(frozen=True)
class Subject:
    """A model, and what is known about it."""

    name: str
    config: TrainConfig
    """A run's, or one made for a folder's model. The fastest backends of this device serve it, whichever served the
    run."""
    tokenizer: Tokenizer | None
    """None: unknown."""
    trained_length: int | None
    """Tokens of the sequences that a run trained on; None: unknown."""
    num_positions: int | None
    """Tokens that a folder's model has positions for; None: any number."""
    load: Callable[[Any], tuple[int, Any]]
    """Shapes, dtypes and shardings of the parameters → their step and the parameters: a run may have removed the
    checkpoint meanwhile, and has a newer one then. Raises UserMistake or TrainingFailed."""

    def check_lengths(self, command: EvaluateCommand) -> str | None:
        """A warning about lengths that the run has never trained on, or None.

        Raises:
          UserMistake: the model has no positions for a length.
        """
        longest = command.token_lengths[-1]
        if self.num_positions is not None and longest > self.num_positions:
            raise UserMistake(
                f"--lengths has {longest:,} tokens, more than the {self.num_positions:,} positions of --model "
                f"{command.model} (max_position_embeddings in its config.json); ask for at most that, or for a model "
                "whose context was extended"
            )
        if self.trained_length is not None and longest > self.trained_length:
            return (
                f"the run has trained on sequences of {self.trained_length:,} tokens; what is measured beyond that is "
                "how far the model generalises"
            )
        return None


def open_subject(command: EvaluateCommand, console: Console) -> Subject:
    """Opens the workdir or the folder of a command, without writing to it.

    Raises:
      UserMistake: there is no such model or checkpoint, or the tokenizer isn't the model's.
      TrainingFailed: every checkpoint is damaged.
    """
    if command.workdir is not None:
        return _open_run(command, command.workdir, console)
    assert command.model is not None, "the command line has one of the two"
    return _open_folder(command, command.model)


def _open_run(command: EvaluateCommand, workdir: Path, console: Console) -> Subject:
    saved = open_saved_run(workdir, setting="--workdir", step=command.step)
    config, checkpoint = saved.config, saved.checkpoint
    for damaged in checkpoint.damaged:
        console.warning(f"{damaged}; the one before it is taken")
    tokenizer = load_trained_tokenizer(saved, command.tokenizer, setting="--tokenizer")
    if tokenizer is not None:
        check_tokenizer(tokenizer, checkpoint, config.model)

    def load(abstract: Any) -> tuple[int, Any]:
        return checkpoint.step, saved.restore_params(abstract)

    model = dataclasses.replace(config.model, implementation=None, decode_implementation=None)
    return Subject(
        config.name,
        dataclasses.replace(config, model=model, lora=LoRAConfig()),  # adapters are merged
        tokenizer,
        trained_length=config.sequence_length,
        num_positions=None,
        load=load,
    )


def _open_folder(command: EvaluateCommand, folder: Path) -> Subject:
    if is_workdir(folder):
        raise UserMistake(f"--model {folder} is the workdir of a run; give it with --workdir")
    try:
        refuse_unusual(folder.absolute())
        model = config_from_huggingface(folder)
        num_positions = read_config(folder).get("max_position_embeddings")
    except (ValueError, OSError) as refused:
        raise UserMistake(f"--model {folder}: {refused}") from refused
    name = command.tokenizer
    if name is None and (folder / _TOKENIZER_NAME).exists():
        try:
            name = str(inside(folder, _TOKENIZER_NAME))
        except ValueError as refused:
            raise UserMistake(f"--model {folder}: {refused}; or name another with --tokenizer") from None
    tokenizer = None if name is None else load_tokenizer(name, setting="--tokenizer")
    if tokenizer is not None and tokenizer.vocab_size > model.vocab_size:
        raise UserMistake(
            f"the {tokenizer.name} tokenizer has {tokenizer.vocab_size:,} ids, more than the {model.vocab_size:,} of "
            f"--model {folder}; give the model's own with --tokenizer"
        )

    def load(abstract: Any) -> tuple[int, Any]:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        try:
            return 0, read_params(folder, model, shardings)
        except (ValueError, OSError) as refused:
            if reason_of(refused) is not None:  # as JAX tells that memory ran out
                raise
            raise UserMistake(f"--model {folder}: {refused}") from refused

    return Subject(
        folder.absolute().name or "model",
        TrainConfig(name="evaluation", model=model, num_steps=1, optimizer=OptimizerConfig(num_warmup_steps=0)),
        tokenizer=tokenizer,
        trained_length=None,
        num_positions=num_positions if isinstance(num_positions, int) else None,
        load=load,
    )


def find_documents(command: EvaluateCommand, subject: Subject, console: Console) -> Documents | None:
    """The documents that losses are measured on: of the files, or else of the run's validation split.

    Returns:
      None: a folder's model has no documents of its own, or `.bin` files were trained on and `--files` are text.

    Raises:
      DataError: the data can't be read.
      UserMistake: files are given, and the tokenizer is unknown.
    """
    data = subject.config.data
    if command.files:
        if subject.tokenizer is None:
            raise UserMistake("--files are text, and the model's tokenizer is unknown; give it with --tokenizer")
        files = find_files(command.files, field="--files")
        cache = TokenCache(Path(data.token_cache_dir), data.token_cache_gib * 2**30, console.note)
        return tokenize_files(
            files, _source_of(files), command.text_field, subject.tokenizer, cache, console.note
        ).documents
    if command.workdir is None:
        return None
    return load_corpus(data, vocab_size=subject.config.model.vocab_size, on_progress=console.note).validation.as_texts()


def _source_of(files: tuple[Path, ...]) -> str:
    """The `data.source` that the names of files speak of: text, unless all of them say otherwise."""
    names = [path.name.removesuffix(".gz").removesuffix(".zst") for path in files]
    endings = {"jsonl": (".jsonl", ".ndjson", ".json"), "parquet": (".parquet",)}
    found = (source for source, suffixes in endings.items() if all(name.endswith(suffixes) for name in names))
    return next(found, "text")
