"""Evaluates a run at length: retrieval over depth and length, and losses by position, at the ends of its phases."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np

from trainer.compile.out_of_memory import running
from trainer.config import TrainConfig
from trainer.data import Tokenizer
from trainer.data.tokenizers import PretokenizedIds
from trainer.errors import UserMistake, name_some
from trainer.evaluate.forward import TokenForward
from trainer.evaluate.losses import ChosenDocuments
from trainer.evaluate.pictures import draw_loss_by_position, draw_retrieval
from trainer.evaluate.results import FILE_NAME, Line, append_lines, describe, read_lines, to_values
from trainer.evaluate.retrieval import mean_scores
from trainer.evaluate.tasks import NOISE, Example, make_examples
from trainer.evaluate.teacher_forced import score
from trainer.launch.peers import Peers
from trainer.loop.setup import Setup
from trainer.observers.observer import EvaluatedAtLength, Observers
from trainer.observers.times import TimeAccount
from trainer.step.train_step import TrainState
from trainer.terminal.console import Console

_NUM_DEPTHS = 10
_NUM_DOCUMENTS = 16
_PICTURES = {"loss_by_position.png": draw_loss_by_position, "retrieval.png": draw_retrieval}


class LengthEvaluator:
    """Asks the model for what lies far back, on the run's mesh, and keeps the results in the workdir.

    Answers are teacher-forced. `python -m trainer.evaluate` decodes them.

    Args:
      workdir: `evaluations.jsonl` and the pictures are written there.
      account: of the run's time.
      console: warns of what cannot be written.
      observers: hear of the results.
      peers: the processes of the run. The first one writes.
    """

    def __init__(self, workdir: Path, account: TimeAccount, console: Console, observers: Observers, peers: Peers):
        self._workdir, self._account, self._console = workdir, account, console
        self._observers, self._peers = observers, peers
        self._forward: tuple[Setup, TokenForward] | None = None  # of the newest phase, which compiles once
        self.is_evaluating = False
        """True inside an evaluation, which compiles and may take long. Any thread may ask."""

    def evaluate_if_due(self, setup: Setup, step: int, state: TrainState) -> None:
        """Evaluates at the end of a phase and every `evaluation.lengths_every_num_steps`, if `lengths` names any.

        Args:
          setup: of the phase.
          step: steps behind the state.
          state: the training state.
        """
        evaluation = setup.run.evaluation
        every = evaluation.lengths_every_num_steps
        is_due = step == setup.phase.last_step or (
            every is not None and step > setup.phase.first_step and step % every == 0
        )
        path = self._workdir / FILE_NAME
        if not evaluation.lengths or not is_due:
            return
        digest = describe_settings(setup)
        known = self._peers.of_first(f"at length/{step}", lambda: json.dumps(_is_known(path, step, digest)))
        if json.loads(known):
            return
        self.is_evaluating = True
        try:
            with self._account.measure("evaluation"), running("evaluating at length"):
                measured = self._measure(setup, state)
        finally:
            self.is_evaluating = False
        if self._peers.is_first:
            lines = [dataclasses.replace(line, step=step, seed=setup.run.seed, digest=digest) for line in measured]
            self._keep(path, lines, step, digest)

    def _measure(self, setup: Setup, state: TrainState) -> list[Line]:
        lengths = sorted(setup.run.evaluation.lengths)
        if self._forward is None or self._forward[0] is not setup:
            self._forward = setup, TokenForward(setup.config, setup.functions.mesh, lengths[-1])
        forward = self._forward[1]
        documents = setup.corpus.validation.as_texts()
        chosen = ChosenDocuments.choose(documents, lengths, _NUM_DOCUMENTS, setup.run.seed)
        nats = [losses.nats for losses in forward(state.params, chosen.streams(documents))]
        scores = score(forward, state.params, setup.examples) if setup.examples else []
        lines = chosen.bin(nats, chosen.weights(documents), lengths[0])
        return [*lines, *mean_scores(setup.examples, [each.tolist() for each in scores])]

    def _keep(self, path: Path, lines: list[Line], step: int, digest: str) -> None:
        try:
            append_lines(path, lines)
            known = [line for line in read_lines(path) if line.digest == digest]
            for name, draw in _PICTURES.items():
                draw(known, step, self._workdir / name)
        except OSError as error:  # what was measured is printed all the same
            self._console.warning(f"{error.filename or path} can't be written: {error.strerror}")
            known = lines
        pictures = [each for name in _PICTURES if (each := self._workdir / name).is_file()]
        self._observers.observe(EvaluatedAtLength(step, describe(known, step), to_values(lines), pictures))


def describe_settings(setup: Setup) -> str:
    """A digest of all that results at length follow from, but for the parameters."""
    evaluation = setup.run.evaluation
    tasks = sorted(evaluation.lengths), evaluation.tasks, evaluation.num_examples, setup.run.seed
    known = [*tasks, setup.corpus.fingerprint, setup.config.model.compute_dtype]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]


def _is_known(path: Path, step: int, digest: str) -> bool:
    return any((line.step, line.digest) == (step, digest) for line in read_lines(path))


def make_run_examples(config: TrainConfig, tokenizer: Tokenizer) -> list[Example]:
    """The examples of the tasks that a run names, at ten depths of each length.

    Raises:
      UserMistake: there is no such task, a length is too short for it, or the tokenizer is unknown.
    """
    evaluation, examples = config.evaluation, list[Example]()
    if evaluation.lengths and evaluation.tasks and isinstance(tokenizer, PretokenizedIds):
        raise UserMistake(
            f"evaluation.tasks={name_some(evaluation.tasks)} are texts, and a .bin file doesn't say which tokenizer "
            "made it; set data.tokenizer to its tokenizer.json, or leave them out (--evaluation.tasks with nothing "
            "behind it)"
        )
    for length in sorted(evaluation.lengths):
        for task in evaluation.tasks:
            examples += make_examples(
                task,
                length,
                num_examples=_NUM_DEPTHS * evaluation.num_examples,
                num_questions=1,
                depths=np.linspace(0, 1, _NUM_DEPTHS).tolist(),
                tokenizer=tokenizer,
                haystack=NOISE,
                seed=config.seed + 1,
            )
    return examples
