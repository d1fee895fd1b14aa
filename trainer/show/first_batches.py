"""The first batches of a run, or of one of its phases, from the very stream that trains."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from trainer.config import TrainConfig
from trainer.data import BatchShare, Corpus, TrainIterator, make_train_batches
from trainer.data.packing import check_lengths
from trainer.data.token_cache import OnProgress
from trainer.loop.initial_params import take_up_data
from trainer.saved_run import open_saved_run


def open_batches(run: TrainConfig, phase: int, corpus: Corpus, on_progress: OnProgress) -> TrainIterator:
    """The training batches from the beginning of a phase on. Touches no device.

    Args:
      run: the settings of the whole run.
      phase: index of the phase; 0 in a run without phases.
      corpus: the run's.
      on_progress: called with a line about what takes long, or couldn't be continued exactly.

    Raises:
      UserMistake: the data can't be trained on.
      TrainingFailed: the documents are used up before, or the checkpoint of `init_from` is damaged.
    """
    phases = run.in_phases()
    for each in phases:
        check_lengths(corpus.train, each.config.sequence_length)
    batches = make_train_batches(phases[0].config, corpus, on_progress)
    if run.init_from is not None and run.init_optimizer == "carry":
        saved = open_saved_run(Path(run.init_from).expanduser().absolute(), setting="init_from")
        for line in take_up_data(batches, saved.checkpoint.data_state):
            on_progress(line)
    if phase and run.data.sources:
        on_progress(f"planning the sequences of the {phases[phase].first_step:,} steps before phase {phase + 1} …")
    for before, after in itertools.pairwise(phases[: phase + 1]):
        batches.skip(before.last_step - before.first_step)
        state = batches.get_state()
        batches.close()
        batches = make_train_batches(after.config, corpus, on_progress)
        for line in batches.set_state(state):
            on_progress(line)
    return batches


def read_batches(batches: TrainIterator, num_sequences: int) -> Iterator[BatchShare]:
    """The first batches that have so many sequences together. The stream can't be used afterwards."""
    num_read = 0
    try:
        while num_read < num_sequences:
            batch = next(batches)
            num_read += batch.batch_size
            yield batch
    finally:
        batches.close()
