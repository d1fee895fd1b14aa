"""Which checkpoints stay: the newest, every so many steps' for good, and the one of the lowest validation loss."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layers import GPTConfig
from trainer.config import CheckpointConfig, EvaluationConfig, TrainConfig
from trainer.loop.saver import spared_steps
from trainer.loop.training_loop import TrainingLoop
from trainer.observers.observer import VALIDATION_LOSS
from trainer.train import take_steps


@given(
    steps=st.sets(st.integers(1, 60)),
    every=st.none() | st.integers(1, 20),
    best=st.booleans(),
    losses=st.dictionaries(st.integers(1, 60), st.none() | st.floats(0, 9, allow_nan=False)),
)
def test_what_is_spared(steps, every, best, losses):
    evaluations = {step: {"step": step, VALIDATION_LOSS: loss} for step, loss in losses.items()}
    config = CheckpointConfig(every_num_steps=1, keep_every_num_steps=every, keep_best=best)
    spared = spared_steps(sorted(steps), config, evaluations)
    measured = sorted((losses[step], step) for step in steps if losses.get(step) is not None)
    expected = [measured[0][1]] if best and measured else []
    expected += [step for step in range(every, 61, every) if step in steps] if every else []
    assert spared == set(expected)


@pytest.mark.parametrize("every", [0, -200, 150])
def test_only_what_is_saved_can_be_kept(every):
    with pytest.raises(ValueError, match=rf"keep_every_num_steps={every} must be a positive multiple of .*=100: other"):
        CheckpointConfig(every_num_steps=100, keep_every_num_steps=every)


def test_the_best_is_known_where_every_checkpoint_is_evaluated():
    config = TrainConfig("x", GPTConfig(), 500, evaluation=EvaluationConfig(every_num_steps=50))
    dataclasses.replace(config, checkpoint=CheckpointConfig(every_num_steps=150, keep_best=True))
    dataclasses.replace(config, checkpoint=CheckpointConfig(every_num_steps=75))
    with pytest.raises(ValueError, match=r"every_num_steps=75 must be a multiple of evaluation\.every_num_steps=50"):
        dataclasses.replace(config, checkpoint=CheckpointConfig(every_num_steps=75, keep_best=True))


def test_a_run_keeps_its_best_checkpoint(make_loop, config, tmp_path, monkeypatch):
    kept = CheckpointConfig(every_num_steps=2, num_kept=1, keep_every_num_steps=6, keep_best=True)
    loop = make_loop(num_steps=10, checkpoint=kept, evaluation=EvaluationConfig(every_num_steps=2))
    losses = {2: 3.0, 4: 1.0, 6: 2.0, 8: None, 10: 1.5}

    def evaluate(step, *_):
        if step in losses:
            loop.evaluator.evaluations[step] = {"step": step, VALIDATION_LOSS: losses[step]}

    monkeypatch.setattr(loop.evaluator, "evaluate_if_due", evaluate)
    monkeypatch.setattr(TrainingLoop, "end", lambda _: 0)
    take_steps(loop)
    loop.close()
    assert sorted(int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir()) == [4, 6, 10]
