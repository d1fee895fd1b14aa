"""Tensors of a folder into shards on devices: several threads read ahead, and a large shard grows on its device."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from layers.pretrained.pieces import Bounds, Piece, find_pieces
from layers.pretrained.safetensors_file import Tensor
from layers.pretrained.table import Source

Progress = Callable[[int, int], None]

# Read at a time; read ahead of what goes to the devices; and how many arrays are on their way there.
_PIECE_BYTES = 1 << 24
_BYTES_AHEAD = 1 << 28
_NUM_ON_THEIR_WAY = 8
# A shard of fewer bytes is made on the host, which spares compiling.
_SMALL_BYTES = 1 << 24
# One thread copies from the page cache at a fraction of what several do, and waits for a disk between reads.
_NUM_READERS = 8
_NUM_COMPILERS = 4


@dataclass(frozen=True)
class Parameter:
    """A parameter to be read.

    Args:
      source: which tensors hold it.
      shape: its whole shape.
      sharding: where it goes.
      stored_dtype: of the tensors.
    """

    source: Source
    shape: tuple[int, ...]
    sharding: Sharding
    stored_dtype: np.dtype

    @functools.cached_property
    def shards(self) -> dict[Bounds, list[jax.Device]]:
        """The distinct shards that this process holds, and the devices that hold each."""
        return _devices_of(self.sharding, self.shape)

    @property
    def order(self) -> tuple[int, ...]:
        """The transposition of blocks as they are read to the parameter's dims; the blocks come first in both."""
        return (0, *(1 + dim for dim in self.source.row.order))

    def num_bytes(self, shard: Bounds) -> int:
        """Of a shard, in the tensors."""
        return self.stored_dtype.itemsize * math.prod(_sizes(shard))

    def target(self, device: jax.Device) -> SingleDeviceSharding:
        """One device's part of the sharding."""
        return SingleDeviceSharding(device, memory_kind=self.sharding.memory_kind)

    def joined(self, shards: Mapping[tuple[Bounds, jax.Device], jax.Array]) -> jax.Array:
        """The parameter, of its shards on each device."""
        on_device = {device: shard for (_, device), shard in shards.items()}
        arrays = [on_device[device] for device in self.sharding.addressable_devices_indices_map(self.shape)]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, arrays)


class _Growth(NamedTuple):
    """What a program that writes a piece into a shard depends on."""

    sizes: tuple[int, ...]
    num_stacked: int
    part: tuple[int, ...]
    part_dtype: np.dtype
    order: tuple[int, ...]
    target: Sharding


class _Programs(NamedTuple):
    make: jax.stages.Compiled
    write: jax.stages.Compiled


@dataclass(frozen=True)
class _Job:
    """A piece of a parameter; `at_once`: its shards are small, and whole in it."""

    parameter: Parameter
    piece: Piece
    at_once: bool

    @property
    def num_bytes(self) -> int:
        """Of the piece, in the tensors."""
        return self.parameter.stored_dtype.itemsize * self.piece.num_blocks * math.prod(_sizes(self.piece.box))

    def growth(self, shard: Bounds, device: jax.Device, dtype: jnp.dtype) -> _Growth:
        """How the piece gets into one of its shards, which is of a dtype."""
        in_file = _in_file(_sizes(self.piece.part_of(shard)), self.parameter.source.row.order)
        return _Growth(
            _sizes(shard),
            len(self.piece.stacked),
            (self.piece.num_blocks, *in_file),
            _narrower(self.parameter.stored_dtype, dtype),
            self.parameter.order,
            self.parameter.target(device),
        )


class ShardReader:
    """Makes arrays of tensors.

    Args:
      tensors: the folder's.
      dtype: of the arrays.
      progress: told after each piece how many bytes have been read, and how many there are.
    """

    def __init__(self, tensors: Mapping[str, Tensor], dtype: jnp.dtype, progress: Progress | None):
        self.tensors = tensors
        self.dtype = dtype
        self.progress = progress

    def read(self, parameters: Sequence[Parameter]) -> list[jax.Array]:
        """Reads parameters: each distinct shard once, and puts it on all devices that hold it."""
        jobs = [job for parameter in parameters for job in _jobs(parameter)]
        num_bytes = sum(parameter.num_bytes(shard) for parameter in parameters for shard in parameter.shards)
        num_read = 0
        arrays: dict[Parameter, dict[tuple[Bounds, jax.Device], jax.Array]] = {}
        on_their_way: deque[jax.Array] = deque()
        with contextlib.ExitStack() as stack:
            readers, compilers = ThreadPoolExecutor(_NUM_READERS), ThreadPoolExecutor(_NUM_COMPILERS)
            for executor in (readers, compilers):
                stack.callback(executor.shutdown, cancel_futures=True)
            programs = self._compile_ahead(compilers, jobs)
            for job, parts in self._read_ahead(readers, jobs):
                num_read += job.num_bytes
                shards = arrays.setdefault(job.parameter, {})
                for shard, part in zip(job.piece.shards, parts, strict=True):
                    for device in job.parameter.shards[shard]:
                        placed = jax.device_put(part, job.parameter.target(device))
                        on_their_way.append(placed)
                        if not job.at_once:
                            make, write = programs[job.growth(shard, device, self.dtype)].result()
                            grown = shards[shard, device] if (shard, device) in shards else make()
                            placed = write(grown, placed, np.array(job.piece.starts_in(shard), np.int32))
                        shards[shard, device] = placed
                while len(on_their_way) > _NUM_ON_THEIR_WAY:
                    jax.block_until_ready(on_their_way.popleft())
                if self.progress is not None:
                    self.progress(num_read, num_bytes)
        return [parameter.joined(arrays[parameter]) for parameter in parameters]

    def _compile_ahead(self, executor: ThreadPoolExecutor, jobs: Sequence[_Job]) -> dict[_Growth, Future[_Programs]]:
        programs: dict[_Growth, Future[_Programs]] = {}
        for job in jobs:
            for shard in () if job.at_once else job.piece.shards:
                for device in job.parameter.shards[shard]:
                    if (growth := job.growth(shard, device, self.dtype)) not in programs:
                        programs[growth] = executor.submit(_compile, growth, self.dtype)
        return programs

    def _read_ahead(
        self, executor: ThreadPoolExecutor, jobs: Sequence[_Job]
    ) -> Iterator[tuple[_Job, list[np.ndarray]]]:
        waiting: deque[tuple[_Job, Future[list[np.ndarray]]]] = deque()
        num_bytes = 0
        for job in jobs:
            while waiting and num_bytes + job.num_bytes > _BYTES_AHEAD:
                first, parts = waiting.popleft()
                num_bytes -= first.num_bytes
                yield first, parts.result()
            waiting.append((job, executor.submit(self._read_piece, job)))
            num_bytes += job.num_bytes
        for first, parts in waiting:
            yield first, parts.result()

    def _read_piece(self, job: _Job) -> list[np.ndarray]:
        """For each shard what it takes of a piece: the blocks with their dims in the file's order, or a small shard."""
        source, piece, box = job.parameter.source, job.piece, _index(job.piece.box)
        names = map(source.tensor_name, piece.positions())
        blocks = [source.row.read(self.tensors[name], source.which, source.shapes, box) for name in names]
        parts = []
        for shard in piece.shards:
            cut = _in_file(_index(piece.part_of(shard)), source.row.order)
            part = np.stack([block[cut] for block in blocks]) if len(blocks) > 1 else _cut(blocks[0], cut)[None]
            if job.at_once:
                part = part.transpose(job.parameter.order).reshape(_sizes(shard)).astype(self.dtype, copy=False)
            # What is wider than the array is rounded here: fewer bytes travel, and devices may not know float64.
            parts.append(part.astype(_narrower(part.dtype, self.dtype), copy=False))
        return parts


def _jobs(parameter: Parameter) -> Iterator[_Job]:
    order = parameter.source.row.order
    outer = order.index(0) if order else None
    small: list[Bounds] = []
    large: list[Bounds] = []
    for shard in parameter.shards:
        (small if parameter.num_bytes(shard) <= _SMALL_BYTES else large).append(shard)
    for shards, at_once, piece_bytes in (
        (small, True, sum(map(parameter.num_bytes, small))),
        (large, False, _PIECE_BYTES),
    ):
        num_stacked, itemsize = parameter.source.row.num_stacked, parameter.stored_dtype.itemsize
        for piece in find_pieces(shards, num_stacked, outer, itemsize, piece_bytes):
            yield _Job(parameter, piece, at_once)


def _devices_of(sharding: Sharding, shape: tuple[int, ...]) -> dict[Bounds, list[jax.Device]]:
    devices: dict[Bounds, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = (part.indices(size) for part, size in zip(index or (), shape, strict=True))
        devices.setdefault(tuple((start, stop) for start, stop, _ in bounds), []).append(device)
    return devices


def _compile(growth: _Growth, dtype: jnp.dtype) -> _Programs:
    def write(shard: jax.Array, blocks: jax.Array, starts: jax.Array) -> jax.Array:
        # Transposed here: NumPy would take longer for that than for reading.
        blocks = blocks.transpose(growth.order).astype(dtype)
        stack = shard.reshape(-1, *growth.sizes[growth.num_stacked :])
        return jax.lax.dynamic_update_slice(stack, blocks, tuple(starts)).reshape(growth.sizes)

    shard = jax.ShapeDtypeStruct(growth.sizes, dtype, sharding=growth.target)
    blocks = jax.ShapeDtypeStruct(growth.part, growth.part_dtype, sharding=growth.target)
    starts = jax.ShapeDtypeStruct((len(growth.part),), np.int32)
    make = jax.jit(functools.partial(jnp.zeros, growth.sizes, dtype), out_shardings=growth.target)
    return _Programs(make.lower().compile(), jax.jit(write, donate_argnums=0).lower(shard, blocks, starts).compile())


def _narrower(stored: np.dtype, wanted: np.dtype) -> np.dtype:
    return wanted if stored.itemsize > wanted.itemsize else stored


def _cut(block: np.ndarray, cut: tuple[slice, ...]) -> np.ndarray:
    part = block[cut]
    return part if part.size == block.size else np.ascontiguousarray(part)


def _in_file(of_dims: tuple[Any, ...], order: tuple[int, ...]) -> tuple[Any, ...]:
    """What belongs to a parameter's dims, in the order of the file's."""
    return tuple(of_dims[order.index(place)] for place in range(len(order)))


def _index(bounds: Bounds) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in bounds)


def _sizes(bounds: Bounds) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in bounds)
