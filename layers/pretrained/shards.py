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

from layers.pretrained.chunks import Bounds, TensorChunk, find_chunks
from layers.pretrained.safetensors_file import Tensor
from layers.pretrained.table import Source

Progress = Callable[[int, int], None]

# Bytes that a thread reads at a time.
_CHUNK_BYTES = 1 << 24
# Bytes that have been read, or are being read, before their transfer to the devices begins.
_BYTES_AHEAD = 1 << 28
# Transfers to devices at a time, each of a chunk or less.
_NUM_TRANSFERS = 8
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
      stored_dtype: of the tensors; of different ones the dtype that holds all their values.
      dtype: of the array that is made of them.
    """

    source: Source
    shape: tuple[int, ...]
    sharding: Sharding
    stored_dtype: np.dtype
    dtype: np.dtype

    @functools.cached_property
    def shards(self) -> dict[Bounds, list[jax.Device]]:
        """The distinct shards that this process holds, and the devices that hold each."""
        return _devices_of(self.sharding, self.shape)

    @property
    def order(self) -> tuple[int, ...]:
        """The transposition of blocks as they are read to the parameter's dims; the blocks come first in both."""
        return (0, *(1 + dim for dim in self.source.row.order))

    def num_bytes(self, shard: Bounds) -> int:
        """Bytes of a shard, in the tensors."""
        return self.stored_dtype.itemsize * math.prod(_sizes(shard))

    def joined(self, shards: Mapping[tuple[Bounds, jax.Device], jax.Array]) -> jax.Array:
        """The parameter, of its shards on each device. Those that belong into other memory go there now."""
        kind = self.sharding.memory_kind
        on_device = {
            device: shard if kind is None else jax.device_put(shard, SingleDeviceSharding(device, memory_kind=kind))
            for (_, device), shard in shards.items()
        }
        arrays = [on_device[device] for device in self.sharding.addressable_devices_indices_map(self.shape)]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, arrays)


class _Empty(NamedTuple):
    """A program that makes an empty shard."""

    sizes: tuple[int, ...]
    dtype: np.dtype
    device: jax.Device

    def lower(self) -> jax.stages.Lowered:
        zeros = functools.partial(jnp.zeros, self.sizes, self.dtype)
        return jax.jit(zeros, out_shardings=SingleDeviceSharding(self.device)).lower()


class _Growth(NamedTuple):
    """A program that writes a chunk into a shard: blocks in the file's order, of `part`'s sizes."""

    shard: _Empty
    num_stacked: int
    part: tuple[int, ...]
    part_dtype: np.dtype
    order: tuple[int, ...]

    def lower(self) -> jax.stages.Lowered:
        sizes, dtype, device = self.shard

        def write(shard: jax.Array, blocks: jax.Array, starts: jax.Array) -> jax.Array:
            # Transposed here: NumPy would take longer for that than for reading.
            blocks = blocks.transpose(self.order).astype(dtype)
            stack = shard.reshape(-1, *sizes[self.num_stacked :])
            return jax.lax.dynamic_update_slice(stack, blocks, tuple(starts)).reshape(sizes)

        on_device = functools.partial(jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(device))
        starts = jax.ShapeDtypeStruct((len(self.part),), np.int32)
        return jax.jit(write, donate_argnums=0).lower(
            on_device(sizes, dtype), on_device(self.part, self.part_dtype), starts
        )


@dataclass(frozen=True)
class _Job:
    """A chunk of a parameter; `at_once`: its shards are small, and whole in it."""

    parameter: Parameter
    chunk: TensorChunk
    at_once: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of the chunk, in the tensors."""
        return self.parameter.stored_dtype.itemsize * self.chunk.num_blocks * math.prod(_sizes(self.chunk.box))

    def growth(self, shard: Bounds, device: jax.Device) -> _Growth:
        """The program that writes the chunk into one of its shards."""
        in_file = _in_file(_sizes(self.chunk.part_of(shard)), self.parameter.source.row.order)
        return _Growth(
            _Empty(_sizes(shard), self.parameter.dtype, device),
            len(self.chunk.stacked),
            (self.chunk.num_blocks, *in_file),
            self.part_dtype,
            self.parameter.order,
        )

    @property
    def part_dtype(self) -> np.dtype:
        """The dtype that is sent to devices: a wider one is rounded on the host, as devices may not have float64."""
        stored, dtype = self.parameter.stored_dtype, self.parameter.dtype
        return dtype if stored.itemsize > dtype.itemsize else stored


class ShardReader:
    """Makes arrays of a folder's tensors; `progress` gets the bytes read so far and their total after each chunk."""

    def __init__(self, tensors: Mapping[str, Tensor], progress: Progress | None):
        self.tensors = tensors
        self.progress = progress

    def read(self, parameters: Sequence[Parameter]) -> list[jax.Array]:
        """Reads parameters: each distinct shard once, and puts it on all devices that hold it."""
        jobs = [job for parameter in parameters for job in _jobs(parameter)]
        num_bytes = sum(parameter.num_bytes(shard) for parameter in parameters for shard in parameter.shards)
        num_read = 0
        arrays: dict[Parameter, dict[tuple[Bounds, jax.Device], jax.Array]] = {}
        transfers: deque[jax.Array] = deque()
        with contextlib.ExitStack() as stack:
            readers = ThreadPoolExecutor(_NUM_READERS, "read_params")
            compilers = ThreadPoolExecutor(_NUM_COMPILERS, "read_params")
            for executor in (readers, compilers):
                stack.callback(executor.shutdown, cancel_futures=True)
            programs = self._compile_ahead(compilers, jobs)
            for job, parts in self._read_ahead(readers, jobs):
                num_read += job.num_bytes
                shards = arrays.setdefault(job.parameter, {})
                for shard, part in zip(job.chunk.shards, parts, strict=True):
                    for device in job.parameter.shards[shard]:
                        placed = jax.device_put(part, device)
                        transfers.append(placed)
                        if not job.at_once:
                            growth = job.growth(shard, device)
                            grown = shards.get((shard, device))
                            if grown is None:
                                grown = programs[growth.shard].result()()
                            starts = np.array(job.chunk.starts_in(shard), np.int32)
                            placed = programs[growth].result()(grown, placed, starts)
                        shards[shard, device] = placed
                while len(transfers) > _NUM_TRANSFERS:
                    jax.block_until_ready(transfers.popleft())
                if self.progress is not None:
                    self.progress(num_read, num_bytes)
        return [parameter.joined(arrays[parameter]) for parameter in parameters]

    def _compile_ahead(
        self, executor: ThreadPoolExecutor, jobs: Sequence[_Job]
    ) -> dict[_Empty | _Growth, Future[jax.stages.Compiled]]:
        # JAX's settings, such as 64-bit types, may be this thread's own.
        has_x64 = jax.dtypes.canonicalize_dtype(np.float64) == np.float64
        programs: dict[_Empty | _Growth, Future[jax.stages.Compiled]] = {}
        for job in jobs:
            for shard in () if job.at_once else job.chunk.shards:
                for device in job.parameter.shards[shard]:
                    growth = job.growth(shard, device)
                    for program in (growth.shard, growth):
                        if program not in programs:
                            programs[program] = executor.submit(_compile, program, has_x64)
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
            waiting.append((job, executor.submit(self._read_chunk, job)))
            num_bytes += job.num_bytes
        for first, parts in waiting:
            yield first, parts.result()

    def _read_chunk(self, job: _Job) -> list[np.ndarray]:
        """Each shard's part of a chunk: the blocks with their dims in the file's order, or a whole small shard."""
        source, chunk, box = job.parameter.source, job.chunk, _index(job.chunk.box)
        names = map(source.tensor_name, chunk.positions())
        blocks = [source.row.read(self.tensors[name], source.which, source.shapes, box) for name in names]
        dtype = job.parameter.dtype if job.at_once else job.part_dtype
        parts = []
        for shard in chunk.shards:
            cut = _in_file(_index(chunk.part_of(shard)), source.row.order)
            cut_blocks = [block[cut].astype(dtype, copy=False) for block in blocks]
            part = np.stack(cut_blocks) if len(blocks) > 1 else _owned(cut_blocks[0])[None]
            if job.at_once:
                part = part.transpose(job.parameter.order).reshape(_sizes(shard))
            parts.append(part)
        return parts


def _jobs(parameter: Parameter) -> Iterator[_Job]:
    order = parameter.source.row.order
    outer = order.index(0) if order else None
    num_stacked, itemsize = parameter.source.row.num_stacked, parameter.stored_dtype.itemsize
    for at_once in (True, False):
        shards = [shard for shard in parameter.shards if (parameter.num_bytes(shard) <= _SMALL_BYTES) == at_once]
        chunk_bytes = sum(map(parameter.num_bytes, shards)) if at_once else _CHUNK_BYTES
        for chunk in find_chunks(shards, num_stacked, outer, itemsize, chunk_bytes):
            yield _Job(parameter, chunk, at_once)


def _devices_of(sharding: Sharding, shape: tuple[int, ...]) -> dict[Bounds, list[jax.Device]]:
    devices: dict[Bounds, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = (part.indices(size) for part, size in zip(index or (), shape, strict=True))
        devices.setdefault(tuple((start, stop) for start, stop, _ in bounds), []).append(device)
    return devices


@functools.lru_cache(maxsize=1024)
def _compile(program: _Empty | _Growth, enable_x64: bool) -> jax.stages.Compiled:
    with jax.enable_x64(enable_x64):
        return program.lower().compile()


def _owned(part: np.ndarray) -> np.ndarray:
    """The array, or a copy where it is a view of a larger one, which it would keep in memory."""
    return part if part.base is None or part.base.nbytes <= part.nbytes else part.copy()


def _in_file(dims: tuple[Any, ...], order: tuple[int, ...]) -> tuple[Any, ...]:
    """Reorders entries of a parameter's dims to the order of the file's dims."""
    return tuple(dims[order.index(dim)] for dim in range(len(order)))


def _index(bounds: Bounds) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in bounds)


def _sizes(bounds: Bounds) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in bounds)
