"""Saves and restores checkpoints: the training state and the place in the data, together or not at all.

    checkpoints/
      300/                 a whole checkpoint, named for the steps behind it
        state/             the training state, written by Orbax
        run.json           step, the data iterator's state, and the config with its changes up to this step
        SHA256SUMS         digests of all the files above; `sha256sum -c SHA256SUMS` checks them by hand
      400.tmp/             one being written, or cut short by a kill
      200.damaged/         one that fails its digests, set aside when its step was saved again
      note.txt             anything else isn't the run's, and is left alone

A checkpoint is written into `N.tmp` and renamed to `N` once everything in it is on the disk. So a kill leaves either
all of it or nothing under that name. Reading verifies the digests first. Orbax notices a missing or a truncated file,
but its data files have no checksum: it restores flipped bits without a word, and training would go on from garbage.

Where several processes train together, each writes its shards, and syncs and digests the files that it has written.
Process 0 does the rest, once all have succeeded. When one fails, the save has failed for all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.checkpoints.folder import (
    DIGESTS,
    Damaged,
    Metadata,
    all_damaged,
    cannot_restore,
    digests,
    find_damage,
    list_checkpoints,
    owner,
    read_metadata,
)
from trainer.compile.out_of_memory import reason_of
from trainer.errors import TrainingFailed
from trainer.files.atomic import set_aside, sync, write_atomically
from trainer.launch.peers import Peers

_ROW_BYTES = 1 << 18
_NUM_REMOVALS = 10
# Orbax by itself gives a save up after twenty minutes. Here the watchdog says when one hangs.
_SAVED_WITHIN_S = 86_400
_BETWEEN_REMOVALS_S = 0.1


@dataclasses.dataclass(frozen=True)
class Restored:
    """The content of a checkpoint."""

    path: Path
    step: int
    state: Any
    """The training state, on the devices."""
    data_state: Any
    """The data iterator's state, as JSON values."""
    config_history: Any
    """As given to `save`, as JSON values; None: saved before checkpoints held it."""
    damaged: tuple[Damaged, ...]
    """Newer checkpoints that were passed over."""


class NotRemovedError(TrainingFailed):
    """A checkpoint is saved, but an older one can't be removed."""


class SharedSave:
    """A save of all processes: each part of it succeeds in all of them, or counts in none. Any thread may call it.

    Args:
      peers: the processes.
      number: of the save in this attempt, failed ones counted.
    """

    def __init__(self, peers: Peers, number: int):
        self._peers, self.topic = peers, f"save/{number}"
        self._given_up = f"{self.topic}/given-up"

    def part(self, name: str, act: Callable[[], str | None]) -> list[str]:
        """Does this process's share of a part, and waits for the others'; returns what `act` has in each process.

        Raises:
          Exception: what `act` raises here.
          TrainingFailed: it has failed in another process.
        """
        failure: Exception | None = None
        try:
            said = {"done": act() or ""}
        except Exception as error:
            failure, said = error, {"failed": f"{type(error).__name__}: {error}"}
            self._peers.post(f"{self._given_up}/{self._peers.index}", name)
        values = [json.loads(value) for value in self._peers.exchange(f"{self.topic}/{name}", json.dumps(said))]
        if failure is not None:
            raise failure
        for index, value in enumerate(values):
            if "failed" in value:
                raise TrainingFailed(f"{self._peers.name(index)}: {value['failed']}")
        return [value["done"] for value in values]

    def barrier(self, *, key: str, timeout_ms: int) -> None:
        """Waits, for Orbax, until every process is here; raises OutOfTouchError once one has failed in a part."""
        self._peers.exchange(f"{self.topic}/{key}", "", patience_s=timeout_ms / 1000, unless=self._given_up)


class Checkpoints:
    """The checkpoints of one run, saved in the background.

    Args:
      folder: the run's `checkpoints/`. What earlier kills left half-written in it is removed.
      num_kept: newest checkpoints kept. Those that `restore_newest` found damaged don't count.
      spared: which of the steps that it is given have a checkpoint to be kept beside these. Called in another thread.
      peers: the processes that save and restore together; each must make the same calls. None: this one alone.
      saving: made and entered when a save begins, and left when it ends, in another thread.
    """

    def __init__(
        self,
        folder: Path,
        num_kept: int,
        *,
        spared: Callable[[Sequence[int]], Collection[int]] = lambda steps: (),
        peers: Peers | None = None,
        saving: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ):
        self._folder = folder.absolute()
        self._num_kept, self._spared, self._watched = num_kept, spared, saving
        self._peers = peers or Peers()
        self._num_saves, self._share = 0, SharedSave(self._peers, 0)
        self._orbax = self._make_orbax()
        self._saving: threading.Thread | None = None
        self._failure: TrainingFailed | None = None
        self._abandoned: set[Path] = set()
        known = self._peers.of_first("checkpoints", lambda: json.dumps(self._take_stock()))
        self._steps: list[int] = json.loads(known)

    def _take_stock(self) -> Sequence[int]:
        """Removes what earlier kills left, and returns the steps that have a checkpoint."""
        listing = list_checkpoints(self._folder)
        for unfinished in listing.unfinished:
            shutil.rmtree(unfinished, ignore_errors=True)
        return listing.steps

    @property
    def newest_step(self) -> int:
        """The step of `newest`; 0 if there is none."""
        return self._steps[-1] if self._steps else 0

    @property
    def newest(self) -> Path | None:
        """The newest checkpoint that isn't known to be damaged."""
        return self._path(self._steps[-1]) if self._steps else None

    def restore_newest(
        self,
        abstract_state_at: Callable[[int], Any],
        refuse: Callable[[Path, Metadata], None] = lambda path, metadata: None,
    ) -> Restored | None:
        """Reads the newest checkpoint that is whole, or returns None if there has never been one.

        Args:
          abstract_state_at: the step of a checkpoint → the state's tree of `jax.ShapeDtypeStruct`s with shardings; the
            mesh may differ from the one saved on.
          refuse: called before the state is read; raises if the run can't go on from this checkpoint.

        Raises:
          Exception: what `refuse` raises.
          TrainingFailed: there are checkpoints, but all are damaged, or the newest whole one is of another form.
            Nothing is removed.
        """
        damaged: list[Damaged] = []
        for step in reversed(self._steps):
            path = self._path(step)
            reason = self._find_damage(path)
            if reason is None:
                metadata = read_metadata(path)
                refuse(path, metadata)
                try:
                    state = self._orbax.restore(path / "state", abstract_state_at(step))
                except Exception as error:
                    if reason_of(error) is not None:
                        raise
                    raise cannot_restore(path, error) from error
                self._steps = [known for known in self._steps if known <= step]
                return Restored(path, step, state, metadata.data, metadata.config_history, tuple(damaged))
            damaged.append(Damaged(path, reason))
        if damaged:
            raise all_damaged(damaged, "put a good copy back, or start afresh with another --workdir")
        return None

    def save(self, step: int, state: Any, data_state: Any, config_history: Any = None, base: str | None = None) -> None:
        """Starts saving, and returns once the state may be overwritten. It waits for an earlier save first.

        Args:
          step: the steps behind the state; must be higher than any saved or restored before.
          state: tree of arrays.
          data_state: JSON values from which the data goes on with the batch after this step.
          config_history: JSON values that tell the config and its changes up to this step.
          base: digest of the frozen base that the state's adapters belong to.

        Raises:
          TrainingFailed: this or the earlier save failed (a full disk, for example). Nothing is left of it, the
            checkpoints before it are kept, and this step, too, may be saved again.
        """
        self.wait()
        assert not self._steps or step > self._steps[-1], f"step {step} after {self._steps}"
        self._remove_abandoned()
        unfinished = self._folder / f"{step}.tmp"
        watched = contextlib.ExitStack()
        watched.enter_context(self._watched())
        try:
            self._begin_save(unfinished, Metadata(step, data_state, config_history, base), state)
        except Exception as error:
            watched.close()
            self._abandon(unfinished)
            raise self._failed_save(step, error) from error
        self._saving = threading.Thread(target=self._finish, args=(watched, step, unfinished), name=f"save-{step}")
        self._saving.start()

    def rehearse(self, devices: Sequence[jax.Device]) -> None:
        """Saves a few bytes of each device as a checkpoint is saved, reads them back, and removes them.

        Args:
          devices: of all processes.

        Raises:
          TrainingFailed: that failed, so no checkpoint could be saved here. Nothing is left of it.
        """
        # Should a kill leave them, then under the names of saves that were cut short.
        unfinished, finished = self._path(1).with_suffix(".tmp"), self._path(2).with_suffix(".tmp")
        sharding = NamedSharding(Mesh(np.array(devices), "device"), PartitionSpec("device"))
        ones = np.ones(len(devices), np.int8)
        try:
            state = {"ones": jax.make_array_from_callback(ones.shape, sharding, ones.__getitem__)}
            self._begin_save(unfinished, Metadata(0, None, None), state)
            self._complete(unfinished, finished)
            # Orbax has written checkpoints that it can't read, under names that it takes for patterns.
            self._orbax.restore(finished / "state", _abstract(state))
            self._share.part("removed", lambda: shutil.rmtree(finished) if self._peers.is_first else None)
        except Exception as error:
            self._abandon(unfinished, finished)
            raise TrainingFailed(
                f"no checkpoint can be saved in {self._folder}: {type(error).__name__}: {error}; "
                "see that the disk has room and can be written to, or choose another folder with --workdir"
            ) from error

    def wait(self) -> None:
        """Returns when no save is in progress any more.

        Raises:
          TrainingFailed: the save failed; a `NotRemovedError` if only the removal of an older checkpoint did.
        """
        if self._saving is not None:
            self._saving.join()
            self._saving = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def close(self) -> None:
        """Waits for the save in progress and lets Orbax's threads go.

        Raises:
          TrainingFailed: the save failed.
        """
        try:
            self.wait()
        finally:
            self._orbax.close()
            self._remove_abandoned()

    def _path(self, step: int) -> Path:
        return self._folder / str(step)

    def _make_orbax(self) -> ocp.StandardCheckpointer:
        if self._peers.count == 1:
            return ocp.StandardCheckpointer(async_options=ocp.options.AsyncOptions(timeout_secs=_SAVED_WITHIN_S))
        # With its processes named, Orbax meets through the coordination service; otherwise by a collective, which would
        # wait for the steps' collectives, and they for it.
        return ocp.StandardCheckpointer(
            async_options=ocp.options.AsyncOptions(
                timeout_secs=_SAVED_WITHIN_S, barrier_sync_fn=lambda **barrier: self._share.barrier(**barrier)
            ),
            multiprocessing_options=ocp.options.MultiprocessingOptions(active_processes=set(range(self._peers.count))),
        )

    def _find_damage(self, path: Path) -> str | None:
        """The damage of a checkpoint. Each process looks at a share of the files, and all return the same."""
        count, index = self._peers.count, self._peers.index
        reason = find_damage(path, lambda name: owner(name) % count == index)
        reasons = self._peers.exchange(f"restore/{path.name}", reason or "")
        return next(filter(None, reasons), None)

    def _begin_save(self, unfinished: Path, metadata: Metadata, state: Any) -> None:
        """Begins to write a state, and returns once it may be overwritten."""
        before, self._num_saves = self._share, self._num_saves + 1
        self._share = SharedSave(self._peers, self._num_saves)
        self._share.part("begun", lambda: self._begin(unfinished, metadata) if self._peers.is_first else None)
        self._peers.forget(before.topic)  # every process is past it
        self._share.part("copied", lambda: self._orbax.save(unfinished / "state", state, save_args=_chunks(state)))

    def _begin(self, unfinished: Path, metadata: Metadata) -> None:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        write_atomically(unfinished / "run.json", json.dumps(dataclasses.asdict(metadata)) + "\n")

    def _finish(self, watched: contextlib.ExitStack, step: int, unfinished: Path) -> None:
        """The save's second half, in a thread of its own. `wait` raises its failure, in the thread that can tell it."""
        with watched:
            try:
                self._complete(unfinished, self._path(step))
                self._steps.append(step)
                self._remove_oldest()
            except Exception as error:
                if self.newest_step == step:
                    self._failure = NotRemovedError(
                        f"checkpoint {self._path(step)} is saved, but an older one can't be removed: {error}"
                    )
                else:
                    self._failure = self._failed_save(step, error)
                    self._abandon(unfinished)
                self._failure.__cause__ = error

    def _complete(self, unfinished: Path, path: Path) -> None:
        """Waits until all is on the disk, and gives it its name."""
        parts = self._share.part("written", lambda: self._write(unfinished))
        found = dict(item for part in parts for item in json.loads(part).items())
        self._share.part("published", lambda: self._publish(unfinished, path, found))

    def _write(self, unfinished: Path) -> str:
        """Waits until this process has written its share; returns the digests of the files, as JSON."""
        self._orbax.wait_until_finished()
        found = digests(unfinished, lambda name: owner(name) == self._peers.index)
        for name in found:
            sync(unfinished / name)  # each machine syncs what it has written itself
        return json.dumps(found)

    def _publish(self, unfinished: Path, path: Path, found: Mapping[str, str]) -> None:
        """Lists the digests, and gives the checkpoint its name."""
        if not self._peers.is_first:
            return
        write_atomically(unfinished / DIGESTS, "".join(f"{found[name]}  {name}\n" for name in sorted(found)))
        for written in (unfinished, *unfinished.rglob("*")):
            sync(written)
        if os.path.lexists(path):
            set_aside(path)
        unfinished.replace(path)
        sync(self._folder)

    def _abandon(self, *unfinished: Path) -> None:
        """Waits until nothing more is being written, removes what a failed save has written, and restarts Orbax."""
        for end in (self._orbax.wait_until_finished, self._orbax.close):
            with contextlib.suppress(Exception):  # the save's own error, perhaps
                end()
        self._orbax = self._make_orbax()
        self._share.part("abandoned", lambda: None)
        if self._peers.is_first:
            self._abandoned.update(unfinished)
        self._remove_abandoned()

    def _remove_abandoned(self) -> None:
        """Removes what failed saves left. TensorStore still writes for a while, and makes a removed folder again."""
        for path in self._abandoned:
            for _ in range(_NUM_REMOVALS):
                shutil.rmtree(path, ignore_errors=True)
                time.sleep(_BETWEEN_REMOVALS_S)
                if not os.path.lexists(path):
                    break

    def _failed_save(self, step: int, error: Exception) -> TrainingFailed:
        # Orbax may report a full disk with errors other than OSError.
        return TrainingFailed(
            f"saving checkpoint {self._path(step)} failed: {type(error).__name__}: {error}; "
            f"the newest good checkpoint is {self.newest or 'not there yet'}; "
            "see that the disk has room and can be written to"
        )

    def _remove_oldest(self) -> None:
        if not self._peers.is_first:
            self._steps = self._steps[-self._num_kept :]
            return
        spared = self._spared(self._steps)
        for step in [step for step in self._steps[: -self._num_kept] if step not in spared]:
            oldest = self._path(step)
            if oldest.is_dir() and not oldest.is_symlink():  # a link's target isn't the run's to remove
                # Renamed first: a kill during the removal must not leave half a checkpoint under its name.
                removed = oldest.with_name(f"{oldest.name}.tmp")
                shutil.rmtree(removed, ignore_errors=True)
                shutil.rmtree(oldest.replace(removed))
            self._steps.remove(step)


def _abstract(state: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)


def _chunks(state: Any) -> Any:
    """Large rows get chunks of their own, so that one layer of a stack can be read without the others."""

    def save_args(array: jax.Array) -> ocp.SaveArgs:
        shard = array.sharding.shard_shape(array.shape)
        row_bytes = math.prod(shard[1:]) * array.dtype.itemsize
        return ocp.SaveArgs(shard_axes=(0,) if row_bytes >= _ROW_BYTES else ())

    return jax.tree.map(save_args, state)
