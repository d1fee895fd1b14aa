"""The command line: a model, lengths, and what to measure at them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.cli.flags import OptionParser, apply_flags, read_path, refuse_unknown_flags, wants_help
from trainer.config.file import flag_types
from trainer.config.sections import check_path
from trainer.config.suggestions import did_you_mean_field
from trainer.errors import UserMistake
from trainer.evaluate.tasks import RULER, TASKS

PROGRAM = "python -m trainer.evaluate"
_FACTORS = {"": 1, "k": 2**10, "m": 2**20}
_LONGEST = 2**30
_ALL, _NONE = "all", "none"


@dataclass(frozen=True, kw_only=True)
class EvaluateCommand:
    """Measures what a model makes of long contexts, with losses of real documents and with synthetic retrieval tasks.

    Lines go to evaluations.jsonl, beside it pictures: loss_by_position.png and retrieval.png. Where the file has lines
    of an earlier step, the tables show both.
    """

    workdir: Path | None = None
    """Folder of the run: what `python -m trainer` printed as its workdir. The run may be under way."""
    model: Path | None = None
    """Hugging Face folder, in the place of a run's."""
    lengths: str = "4k,32k,128k"
    """Lengths of contexts in tokens, questions and answers included; k is 1,024."""
    tasks: tuple[str, ...] = (_ALL,)
    """Retrieval tasks by name; all (RULER's) or none of them."""
    depths: int = 10
    """Depths in the context at which a needle is hidden, evenly spread from its beginning to its end."""
    examples: int = 1
    """Contexts of each task, length and depth; of a task without depths as many as of all depths together."""
    questions: int = 1
    """Questions about one context, whose keys and values they share. Each question of a needle task adds needles, so
    more than one makes the task harder than RULER's."""
    documents: int = 8
    """Documents at most that each loss is measured on: as many of the longest, and of each power of two in length."""
    files: tuple[str, ...] = ()
    """Globs of text, JSON-lines or Parquet files to take losses from. None: the run's validation documents."""
    text_field: str = "text"
    """Field or column with the text, of JSON-lines and Parquet files."""
    haystack: Path | None = None
    """UTF-8 file whose text the needles are hidden in. None: RULER's noise, a few sentences over and over."""
    output: Path | None = None
    """Folder to write to. None: the workdir."""
    step: int | None = None
    """Step of the checkpoint, of those that the run keeps. None: the newest."""
    tokenizer: str | None = None
    """`byte`, or the path of a `tokenizer.json`. None: where the run found it, or the model's folder has it."""
    seed: int = 0
    """Seed of the tasks and of the choice of documents."""

    def __post_init__(self):
        if self.tokenizer is not None:
            check_path("tokenizer", self.tokenizer)
        for pattern in self.files:
            check_path("files", pattern)
        for name in ("depths", "examples", "questions", "documents"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} must be an integer from 0 to 2^32 - 1")
        _ = self.token_lengths, self.task_names  # refuses others

    @property
    def token_lengths(self) -> tuple[int, ...]:
        """`lengths`, rising.

        >>> EvaluateCommand(lengths="32k,4k,1000").token_lengths
        (1000, 4096, 32768)
        """
        found = [re.fullmatch(r"(\d{1,10})([km]?)", word.strip().lower()) for word in self.lengths.split(",")]
        lengths = {int(length[1]) * _FACTORS[length[2]] for length in found if length is not None}
        if not all(found) or not 2 <= min(lengths) <= max(lengths) <= _LONGEST:
            raise ValueError(
                f"lengths={self.lengths!r}: expected numbers of tokens from 2 to {_LONGEST:,}, such as 4k,32k,128k"
            )
        return tuple(sorted(lengths))

    @property
    def task_names(self) -> tuple[str, ...]:
        """The names of the tasks."""
        names = tuple(name for word in self.tasks for name in word.split(","))
        if names in ((_ALL,), (_NONE,)):
            return tuple(RULER) if names == (_ALL,) else ()
        for name in names:
            if name not in TASKS:
                nearest = did_you_mean_field(name, sorted(TASKS))
                raise ValueError(f"tasks: there is no {name!r}{nearest or ''}; there are {', '.join(TASKS)}, all, none")
        return names

    @property
    def asks_for_tasks(self) -> bool:
        """True if tasks are named, so that they aren't left out silently."""
        return self.tasks not in ((_ALL,), (_NONE,))


def parse_command_line(arguments: Sequence[str]) -> EvaluateCommand:
    """Reads the flags.

    Args:
      arguments: what follows `python -m trainer.evaluate`.

    Raises:
      UserMistake: unknown flag, ill-typed value, or no model.
      SystemExit: with status 0, after `--help` was printed.
    """
    parser = OptionParser()
    for name in ("workdir", "model", "output", "haystack"):
        parser.add_argument(f"--{name}", type=read_path)
    options, flags = parser.parse_known_args(arguments)
    refuse_unknown_flags(flags, flag_types(EvaluateCommand), PROGRAM)
    if wants_help(flags):
        apply_flags(EvaluateCommand, flags, EvaluateCommand(), program=PROGRAM)
    if (options.workdir is None) == (options.model is None):
        raise UserMistake(
            f"give one of --workdir DIR and --model DIR; for example: {PROGRAM} --workdir runs/smoke --lengths 4k,32k"
        )
    command = apply_flags(EvaluateCommand, flags, EvaluateCommand(**vars(options)), program=PROGRAM)
    if command.model is not None and command.step is not None:
        raise UserMistake("--step is of a run's checkpoints, and --model is no run; leave it out, or give --workdir")
    if command.model is not None and command.output is None:
        raise UserMistake("--output DIR is missing, where evaluations.jsonl of --model is to lie")
    return command
