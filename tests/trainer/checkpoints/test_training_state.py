"""Checkpoints: saved whole, restored bit for bit, and damage found before it is trained on."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.checkpoints.folder import find_damage
from trainer.checkpoints.training_state import Checkpoints
from trainer.errors import TrainingFailed


def make_state(rng: np.random.Generator) -> dict:
    return {
        "step": jnp.int32(rng.integers(1000)),
        "params": {f"w{i}": jnp.asarray(rng.normal(size=(64, 33)), jnp.float32) for i in range(4)},
        "moments": [jnp.asarray(rng.normal(size=(5,)), jnp.bfloat16)],
    }


def abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def assert_same(state, expected):
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert got.dtype == want.dtype
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def saved(tmp_path, rng):
    """A folder with checkpoints 5, 10 and 15, and the states in them."""
    states = {step: make_state(rng) for step in (5, 10, 15)}
    checkpoints = Checkpoints(tmp_path, num_kept=3)
    for step, state in states.items():
        checkpoints.save(step, state, {"batches": step})
    checkpoints.close()
    return tmp_path, states


def test_the_newest_comes_back_bit_for_bit(saved):
    folder, states = saved
    checkpoints = Checkpoints(folder, num_kept=3)
    restored = checkpoints.restore_newest(lambda _: abstract(states[15]))
    assert (restored.step, restored.data_state, restored.damaged) == (15, {"batches": 15}, ())
    assert_same(restored.state, states[15])
    assert checkpoints.newest == folder / "15"
    checkpoints.close()


def test_a_state_may_be_donated_while_it_is_being_saved(tmp_path, rng):
    update = jax.jit(lambda state: jax.tree.map(lambda x: x * 2 + 1, state), donate_argnums=0)
    state = update([jnp.asarray(rng.normal(size=(1500, 1000)), jnp.float32) for _ in range(4)])
    expected = jax.tree.map(lambda x: np.array(x, copy=True), state)
    checkpoints = Checkpoints(tmp_path, num_kept=1)
    checkpoints.save(1, state, None)
    for _ in range(5):
        state = update(state)
    checkpoints.wait()
    assert_same(checkpoints.restore_newest(lambda _: abstract(state)).state, expected)
    checkpoints.close()


def test_some_are_spared_beside_the_newest_until_others_are(tmp_path, rng):
    best = [2]
    checkpoints = Checkpoints(tmp_path, num_kept=1, spared=lambda steps: {step for step in steps if step in best})
    for step in range(1, 4):
        checkpoints.save(step, make_state(rng), None)
    checkpoints.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]
    best[:] = [3, 4]
    checkpoints.save(4, make_state(rng), None)
    checkpoints.save(5, make_state(rng), None)
    checkpoints.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4", "5"]
    again = Checkpoints(tmp_path, num_kept=1, spared=lambda steps: {3})
    again.save(6, make_state(rng), None)
    again.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "6"]


def test_what_a_kill_left_half_written_is_removed(saved):
    folder, states = saved
    shutil.copytree(folder / "15", folder / "20.tmp")
    checkpoints = Checkpoints(folder, num_kept=3)
    assert checkpoints.restore_newest(lambda _: abstract(states[15])).step == 15
    assert not (folder / "20.tmp").exists()
    checkpoints.close()


def largest_file(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def damage(file: Path, kind: str, rng: np.random.Generator) -> str:
    """Damages a file; returns what must be said about it."""
    content = file.read_bytes()
    match kind:
        case "missing":
            file.unlink()
            return f"{file.name} is missing"
        case "cut":
            file.write_bytes(content[: len(content) // 2])
        case "flipped":
            position = int(rng.integers(len(content)))
            garbled = bytearray(content)
            garbled[position] ^= 1 << int(rng.integers(8))
            file.write_bytes(bytes(garbled))
    return f"{file.name} is not what was written"


@pytest.mark.parametrize("kind", ["missing", "cut", "flipped"])
def test_damage_to_any_file_is_found_and_the_one_before_is_restored(saved, rng, kind):
    folder, states = saved
    files = sorted(path for path in (folder / "15").rglob("*") if path.is_file() and path.stat().st_size)
    for file in files:
        whole = file.read_bytes()
        said = damage(file, kind, rng)
        before = contents(folder)
        checkpoints = Checkpoints(folder, num_kept=3)
        restored = checkpoints.restore_newest(lambda _: abstract(states[10]))
        checkpoints.close()
        assert restored.step == 10, file
        [damaged] = restored.damaged
        assert damaged.path == folder / "15"
        if file.name != "SHA256SUMS":
            assert damaged.reason.endswith(said)
            assert str(damaged) == f"checkpoint {folder / '15'} is damaged ({damaged.reason})"
        assert contents(folder) == before, "nothing is removed or changed"
        file.write_bytes(whole)
    assert find_damage(folder / "15") is None


def test_a_file_that_no_digest_covers_is_damage(saved):
    folder, _ = saved
    sums = folder / "15" / "SHA256SUMS"
    *lines, last = sums.read_text().splitlines(keepends=True)
    sums.write_text("".join(lines))
    assert find_damage(folder / "15") == f"SHA256SUMS doesn't list {last.split()[1]}"


def test_a_damaged_checkpoint_is_kept_when_its_step_is_saved_again(saved, rng):
    folder, states = saved
    damage(largest_file(folder / "15"), "cut", rng)
    held = contents(folder / "15")
    checkpoints = Checkpoints(folder, num_kept=2)
    assert checkpoints.restore_newest(lambda _: abstract(states[10])).step == 10
    again = make_state(rng)
    for step in (12, 15, 20):
        checkpoints.save(step, again, step)
    checkpoints.wait()
    assert sorted(path.name for path in folder.iterdir()) == ["15", "15.damaged", "20"]
    assert contents(folder / "15.damaged") == held
    restored = checkpoints.restore_newest(lambda _: abstract(again))
    assert (restored.step, restored.damaged) == (20, ())
    assert_same(restored.state, again)
    checkpoints.close()


def test_a_run_whose_checkpoints_are_all_damaged_stops_and_removes_nothing(saved, rng):
    folder, states = saved
    for step in states:
        damage(largest_file(folder / str(step)), "cut", rng)
    before = contents(folder)
    checkpoints = Checkpoints(folder, num_kept=3)
    with pytest.raises(TrainingFailed, match="every checkpoint of this run is damaged") as caught:
        checkpoints.restore_newest(lambda _: abstract(states[5]))
    assert all(str(folder / str(step)) in str(caught.value) for step in states)
    assert contents(folder) == before
    checkpoints.close()


def test_a_whole_checkpoint_of_another_form_is_not_passed_over(saved):
    folder, states = saved
    checkpoints = Checkpoints(folder, num_kept=3)
    other = abstract(states[15] | {"new": states[15]["step"]})
    with pytest.raises(TrainingFailed, match=r"15 is whole, but this version can't restore it"):
        checkpoints.restore_newest(lambda _: other)
    checkpoints.close()


def full(*_, **__):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("place", ["write_atomically", "digests"], ids=["at once", "in the background"])
def test_a_failed_save_names_the_newest_good_checkpoint_and_leaves_the_others(saved, rng, monkeypatch, place):
    folder, states = saved
    checkpoints = Checkpoints(folder, num_kept=3)
    assert checkpoints.restore_newest(lambda _: abstract(states[15])).step == 15
    monkeypatch.setattr(f"trainer.checkpoints.training_state.{place}", full)
    with pytest.raises(TrainingFailed) as caught:  # noqa: PT012
        checkpoints.save(20, make_state(rng), None)
        assert place == "digests"
        checkpoints.wait()
    monkeypatch.undo()
    assert str(caught.value).startswith(f"saving checkpoint {folder / '20'} failed: OSError: [Errno 28] No space left")
    assert f"the newest good checkpoint is {folder / '15'}" in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)
    assert sorted(path.name for path in folder.iterdir()) == ["10", "15", "5"], "nothing half-written stays"
    assert [find_damage(folder / name) for name in ("5", "10", "15")] == [None] * 3
    assert checkpoints.newest_step == 15
    again = make_state(rng)
    checkpoints.save(20, again, None)
    checkpoints.wait()
    assert checkpoints.newest_step == 20
    assert_same(checkpoints.restore_newest(lambda _: abstract(again)).state, again)
    checkpoints.close()


def test_an_old_checkpoint_that_cannot_be_removed_is_told_and_the_new_one_counts(saved, rng, monkeypatch):
    folder, states = saved
    checkpoints = Checkpoints(folder, num_kept=3)
    assert checkpoints.restore_newest(lambda _: abstract(states[15])).step == 15
    with monkeypatch.context() as patch:
        remove = "trainer.checkpoints.training_state.shutil.rmtree"
        patch.setattr(remove, lambda path, ignore_errors=False: ignore_errors or full())
        checkpoints.save(20, make_state(rng), None)
        with pytest.raises(TrainingFailed, match=r"20 is saved, but an older one can't be removed: .* No space left"):
            checkpoints.wait()
    assert checkpoints.newest_step == 20
    checkpoints.save(25, make_state(rng), None)
    checkpoints.close()
    assert sorted(path.name for path in folder.glob("[0-9]?")) == ["15", "20", "25"]


def test_every_file_and_folder_is_on_the_disk_before_the_checkpoint_has_its_name(tmp_path, rng, monkeypatch):
    synced, synced_before_the_name = set(), set()
    fsync, rename = os.fsync, os.replace

    def watch_fsync(descriptor):
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def watch_rename(source, target):
        if Path(target) == tmp_path / "7":
            synced_before_the_name.update(synced)
        rename(source, target)

    monkeypatch.setattr("os.fsync", watch_fsync)
    monkeypatch.setattr("os.replace", watch_rename)
    checkpoints = Checkpoints(tmp_path, num_kept=1)
    checkpoints.save(7, make_state(rng), None)
    checkpoints.close()
    tree = [tmp_path / "7", *(tmp_path / "7").rglob("*")]
    assert len(tree) > 5
    assert [path for path in tree if path.stat().st_ino not in synced_before_the_name] == []


@pytest.mark.parametrize("name", ["exp[1]", "a\\b"])
def test_a_rehearsal_finds_where_nothing_could_be_read_back(tmp_path, name):
    (tmp_path / name).mkdir()
    checkpoints = Checkpoints(tmp_path / name, num_kept=3)
    with pytest.raises(TrainingFailed, match=r"no checkpoint can be saved in .*does not exist"):
        checkpoints.rehearse(jax.devices()[:1])
    checkpoints.close()
    assert list((tmp_path / name).iterdir()) == []


@pytest.mark.parametrize("name", ["a{1}", "50%20", "a b", "#x", "日本", "x:y"])
def test_checkpoints_in_folders_of_odd_names_are_read_back(tmp_path, rng, name):
    (tmp_path / name).mkdir()
    checkpoints, state = Checkpoints(tmp_path / name, num_kept=3), make_state(rng)
    checkpoints.rehearse(jax.devices())
    checkpoints.save(1, state, None)
    checkpoints.wait()
    assert_same(checkpoints.restore_newest(lambda _: abstract(state)).state, state)
    checkpoints.close()
