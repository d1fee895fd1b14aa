"""A program that a run compiles after its first step is recorded with its reason, and told once."""

import dataclasses
import re
import time

import numpy as np
import pytest

from trainer.config.file import load_config
from trainer.data import BatchShare
from trainer.train import prepare, train
from trainer.workdir import claim_workdir

NUM_STEPS, LONG_STEP = 12, 5


class UnevenBatches:
    """A run's batches, one of them with twice the sequences."""

    def __init__(self, batches):
        self._batches, self._step = batches, 0

    def __getattr__(self, name):
        return getattr(self._batches, name)

    def __next__(self):
        self._step += 1
        batch = next(self._batches)
        if self._step != LONG_STEP:
            return batch
        twice = {name: np.concatenate([array, array]) for name, array in batch.arrays.items()}
        rows = (*batch.indices, *(row + batch.batch_size for row in batch.indices))
        return BatchShare(twice, rows, batch.document_lengths * 2)


@pytest.fixture(scope="module")
def uneven(trainer_command, tmp_path_factory, read_run, read_tensorboard):
    """A run over such batches: its record, the rows of its steps, TensorBoard's values and the lines it printed."""
    config = dataclasses.replace(load_config(trainer_command.config), num_steps=NUM_STEPS, log_every_num_steps=4)
    workdir = claim_workdir(tmp_path_factory.mktemp("uneven") / "run", config)
    lines: list[str] = []

    def prepare_unevenly(*arguments):
        [setup] = prepare(*arguments)
        return [dataclasses.replace(setup, batches=UnevenBatches(setup.batches))]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.train.prepare", prepare_unevenly)
        patch.setattr("trainer.terminal.console.Console.note", lambda _, line, **__: lines.append(line))
        assert train(config, workdir, command=[], started=time.perf_counter()) == 0
    record, steps, _ = read_run(workdir.path)
    return record, steps, read_tensorboard(workdir.tensorboard), lines


STAGES = ("trace_s", "lower_s", "compile_s")


def test_a_recompile_is_recorded_with_when_and_how_long_and_why(uneven):
    record, _, _, _ = uneven
    (recompile,) = record["compile"]["recompiles"]
    assert (recompile["name"], recompile["step"]) == ("train_step", LONG_STEP)
    assert record["started"] <= recompile["at"] <= record["updated"]
    assert min(recompile[stage] for stage in STAGES) > 0
    assert recompile["cache_hit"] in (True, False)
    assert recompile["memory"]["arguments"] > record["compile"]["train_step"]["memory"]["arguments"]
    assert recompile["changes"] == [
        {"argument": f"batch['{name}']", "what": "shape", "before": "(2, 256)", "after": "(4, 256)"}
        for name in ("positions", "segment_ids", "targets", "tokens", "weights")
    ]


def test_a_recompile_is_warned_of_once_in_one_line(uneven):
    lines = uneven[3]
    (line,) = [line for line in lines if "train_step was compiled again" in line]
    times = r"trace [\d.]+ m?s, lower [\d.]+ m?s, XLA [\d.]+ m?s \((compiled|read from the cache)\)"
    expected = rf"warning: step {LONG_STEP}: train_step was compiled again, {times}, because (.*)"
    assert re.fullmatch(expected, line)[2] == "batch['positions'] and 4 more: shape (2, 256) → (4, 256)"


def test_the_time_of_a_recompile_is_no_time_of_a_step(uneven):
    record, steps, _, _ = uneven
    told = record["compile"]
    (recompile,) = told["recompiles"]
    waited = {row["step"]: row["recompile_s"] for row in steps if "recompile_s" in row}
    assert waited == {LONG_STEP: pytest.approx(sum(recompile[stage] for stage in STAGES))}
    programs = [told[name] for name in ("init_state", "train_step", "eval_step")] + [recompile]
    compiling = sum(program[stage] for program in programs for stage in STAGES)
    assert record["time"]["compile_s"] >= compiling
    windows = [row for row in steps if "step_s" in row]
    lengths = np.diff([0, *(row["step"] for row in windows)])
    in_windows = sum(row["step_s"] * length for row, length in zip(windows, lengths, strict=True))
    accounted = record["time"]["step_s"] + record["time"]["data_wait_s"]
    assert accounted <= in_windows < accounted + 0.5 * waited[LONG_STEP]


def test_tensorboard_shows_the_recompile_at_its_step(uneven):
    record, _, shown, _ = uneven
    told = record["compile"]
    (recompile,) = told["recompiles"]
    for stage in STAGES:
        expected = {0: told["train_step"][stage], LONG_STEP: recompile[stage]}
        assert shown[f"compile/train_step/{stage}"] == pytest.approx(expected, rel=1e-6)
    assert set(shown["compile/train_step/memory_peak_bytes"]) == {0, LONG_STEP}
    assert set(shown["speed/recompile_s"]) == {LONG_STEP}
    text = shown["compile/recompile/text_summary"][LONG_STEP]
    assert text.endswith("because batch['positions'] and 4 more: shape (2, 256) → (4, 256)")
