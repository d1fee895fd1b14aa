"""An update whose loss or gradient isn't finite is skipped, told and counted; too many in a row end the run."""

import dataclasses
import json

import pytest

import trainer.train
from tests.trainer.loop.faulty_run import poison, spoiled_batches
from tests.trainer.loop.steps import end_well, record_of, saved, skip_updates
from trainer.errors import TrainingFailed
from trainer.train import take_steps


def test_skipped_updates_are_told_and_counted_and_not_saved(make_loop, watched_console):
    """The updates of steps 12, 13, 20 and 33 to 39 of 60 are skipped, and every twentieth step is saved."""
    loop = make_loop()
    skip_updates(loop, [12, 13, 20, *range(33, 40)])
    end_well(loop)
    assert take_steps(loop) == 0
    loop.close()
    assert saved(loop) == ["40", "60"]
    lines = [tuple(told) for told in watched_console.told if "skipped" in told[1]]
    reason = "loss nan, gradient norm 1.0: not finite, so this update is skipped"
    assert lines == [
        ("warning", f"step 12: {reason}, and 1 more up to step 13; skipped in the whole run: 2"),
        ("warning", f"step 20: {reason}; skipped in the whole run: 3"),
        ("note", "step 20 is not saved, since its update was skipped"),
        ("warning", f"step 33: {reason}, and 6 more up to step 39; skipped in the whole run: 10"),
    ]
    entries = [json.loads(line) for line in loop.workdir.metrics.read_text().splitlines()]
    assert [entry["num_skipped"] for entry in entries[10:22]] == [0, 1, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3]
    assert [entry["step"] for entry in entries if entry["loss"] is None] == [12, 13, 20, *range(33, 40)]
    record = record_of(loop)
    assert (record["num_skipped_updates"], record["status"]) == (10, "completed")


def test_a_stop_amid_skipped_updates_saves_them(make_loop):
    loop = make_loop()
    skip_updates(loop, range(2, 9))
    loop.run_window()
    loop.run_window()
    assert loop.is_amid_skipped
    loop.saver.save_at_last(loop.snapshot)
    loop.close()
    assert saved(loop) == ["8"]


@pytest.mark.parametrize("last_step", [20, 30])
def test_the_end_of_a_phase_is_saved_though_its_update_was_skipped(make_loop, last_step):
    """A stop before the next phase's first save goes on from there. Every twentieth step is saved otherwise."""
    loop = make_loop()
    loop.setup.phase = dataclasses.replace(loop.setup.phase, last_step=last_step)
    loop.setups = [loop.setup, loop.setup]
    skip_updates(loop, [20, 30])
    while loop.progress.step < last_step:
        loop.run_window()
        loop.save_if_due()
    loop.close()
    assert saved(loop) == [str(last_step)]


@pytest.mark.parametrize(("limit", "step"), [(1, 5), (3, 12)])
def test_too_many_skipped_updates_in_a_row_end_the_run_with_the_last_good_checkpoint(make_loop, config, limit, step):
    """However few: a window ends before the run does, and is logged. Nothing is saved of it."""
    loop = make_loop(optimizer=dataclasses.replace(config.optimizer, max_skipped_in_a_row=limit))
    skip_updates(loop, [5, 7, 8, 10, 11, 12])
    loop.run_window()
    loop.saver.save(loop.snapshot)
    with pytest.raises(TrainingFailed) as failed:
        take_steps(loop)
    loop.close()
    before = f", like the {limit - 1} updates before" if limit > 1 else ""
    assert str(failed.value).startswith(
        f"step {step}: loss nan, gradient norm 1.0: not finite{before}, so the run stops; "
        f"the last good checkpoint is {loop.workdir.checkpoints}/1. "
    )
    assert saved(loop) == ["1"]


def test_a_nan_in_the_data_is_skipped_and_a_row_of_them_ends_the_run_that_can_go_on(
    trainer_command, tmp_path, read_run, read_tensorboard, monkeypatch
):
    """Steps 12 and 13 are skipped. Of 41 to 48, the eighth ends the run, which was saved at 40."""
    with monkeypatch.context() as patch:
        patch.setattr(trainer.train, "make_batches", spoiled_batches({12, 13, *range(41, 49)}, poison))
        stopped = trainer_command.run("--workdir", tmp_path)
    assert stopped.status == 1
    assert stopped.errors.startswith(
        "error: step 48: loss nan, gradient norm nan: not finite, like the 7 updates before, so the run stops; "
        f"the last good checkpoint is {tmp_path}/checkpoints/40. A lower optimizer.learning_rate"
    )
    assert "warning: step 12: loss nan, gradient norm nan: not finite, so this update is skipped" in stopped.output
    record, steps, _ = read_run(tmp_path)
    assert (record["status"], record["num_skipped_updates"]) == ("failed", 10)
    assert record["message"] in stopped.errors
    assert [row["step"] for row in steps if row["loss"] is None] == [12, 13, *range(41, 49)]

    resumed = trainer_command.run("--workdir", tmp_path)
    assert resumed.status == 0, resumed.errors
    assert "resumed at step 40/60" in resumed.output
    record, steps, _ = read_run(tmp_path)
    assert (record["status"], record["num_skipped_updates"]) == ("completed", 2)
    assert [row["num_skipped"] for row in steps] == [0] * 11 + [1] + [2] * 48
    assert all(row["loss"] < 6 for row in steps if row["step"] > 13)
    shown = read_tensorboard(tmp_path / "tensorboard")["train/num_skipped"]
    assert shown == {row["step"]: row["num_skipped"] for row in steps}
