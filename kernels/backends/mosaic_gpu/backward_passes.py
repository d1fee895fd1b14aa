"""The parts that the backward passes share: their arrays, their context, and the division of blocks among programs.

Sources: FlashAttention-3 (arXiv:2407.08608), FlashAttention-2 (arXiv:2307.08691).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.backends.mosaic_gpu.padding import padded_head_dim
from kernels.backends.mosaic_gpu.tile_mask import TokenArrays
from kernels.backends.mosaic_gpu.tuning import MAX_EQUAL_HEAD_DIM, MosaicBackwardTuning
from kernels.backends.mosaic_gpu.warpgroup_tiles import BlockRows
from kernels.call import AttentionCall
from kernels.hopper.launch import Roles, launch
from kernels.hopper.machine import Hopper
from kernels.hopper.memory import zeroed_ref
from kernels.hopper.softmax import LOG2_E, finite_lse
from kernels.hopper.tile_scheduler import TileScheduler, WorkBlock
from kernels.plan import Row

LSE, DELTA = 0, 1
"""Indices of a query's two numbers in shared memory, `lse_delta`."""


class BackwardArrays(NamedTuple):
    """The arrays that the passes read and write, padded to whole head dims, and lse and delta to whole tiles.

    Within a kernel, references to the arrays.
    """

    query: Any
    key: Any
    value: Any
    d_output: Any
    # float32 `[B, N, T]`: natural, and −inf where a row attends to nothing; within a kernel in units of log₂, and huge
    lse: Any
    delta: Any  # float32 `[B, N, T]`: rowsum(dO∘O), less the gradient of lse
    offsets: Any  # columns that stand for delta, and mostly for lse (`offset_columns`); None where a pass reads both
    rows: BlockRows  # the tiles of each block, and what its warpgroups meet in them
    tokens: TokenArrays
    num_blocks_in_use: Any = None  # the number of blocks of each head that hold keys, int32 `[1]`; None: all
    num_claimed: Any = None  # the dynamic tile scheduler's counter
    d_query: Any = None  # an output, or the reference that a fused pass adds to
    d_key: Any = None
    d_value: Any = None


_D_QUERY = BackwardArrays._fields.index("d_query")

SmemT = TypeVar("SmemT", bound=Any)
BarriersT = TypeVar("BarriersT", bound=Any)


class _PersistentProgram(NamedTuple):
    """The part of the context that is the same for all blocks of a persistent program."""

    gmem: BackwardArrays
    smem: Any
    barriers: Any
    number: jax.Array
    warpgroup: jax.Array


class BackwardContext(NamedTuple, Generic[SmemT, BarriersT]):
    """The context of every role of a pass: the call and how it runs, a program's memory and barriers, and one block."""

    call: AttentionCall
    tuning: MosaicBackwardTuning
    machine: Hopper
    gmem: BackwardArrays
    smem: SmemT
    barriers: BarriersT
    warpgroup: jax.Array
    block: WorkBlock  # the block that stays in shared memory
    first: jax.Array  # index of the block's first query or key
    tiles: Row  # the tiles that the block visits, of one head
    num_steps: jax.Array  # number of tiles of all heads
    last_num_steps: Any = 0  # num_steps of the program's block before this one; 0 for the first

    def query_tile(self, step, found: tuple[Any, Any] | None = None) -> tuple[Any, Any, Any]:
        """The query tile of a step: its head, its number in that head, and its rank among the block's tiles there.

        Where the producer walks the tiles, it has found the rank and the number.

        All tiles of one of the group's heads come before the next head's. So programs that run at the same time read
        the same head, and share its tiles in the L2 cache.
        """
        member = jax.lax.div(step, self.tiles.num_tiles)
        rank = step - member * self.tiles.num_tiles if found is None else found[0]
        head = self.block.head * self.call.group_size + member
        return head, self.tiles.tile(rank) if found is None else found[1], rank

    def for_each_tile(self, copy: Callable[..., None]) -> None:
        """Producer: calls `copy(step)` for each step; where it walks the tiles, `copy(step, (rank, tile))`."""
        if self.tiles.kind is None:
            pl.loop(0, self.num_steps)(copy)
        else:
            self.tiles.walk(self.num_steps, lambda step, rank, tile: copy(step, (rank, tile)))

    def load_keys_and_values(self, keys_full, values_full) -> None:
        """Starts to copy the block's keys and values; each arrives at its barrier."""
        batch, head, _ = self.block
        keys = pl.ds(self.first, self.tuning.block_kv)
        plgpu.copy_gmem_to_smem(self.gmem.key.at[batch, keys, head], self.smem.k, keys_full)
        plgpu.copy_gmem_to_smem(self.gmem.value.at[batch, keys, head], self.smem.v, values_full)

    def wait_for_consumers(self) -> None:
        """Waits until no consumer reads the block's keys and values any more."""
        plgpu.barrier_arrive(self.barriers.done)
        plgpu.barrier_wait(self.barriers.done)

    def store_gradient(self, gradient, smem, ref, first, first_column: int = 0) -> None:
        """Starts to write a gradient of a block's queries, keys or values from `first` on, through shared memory."""
        smem[...] = gradient.astype(self.call.dtype)
        plgpu.commit_smem()
        rows, columns = pl.ds(first, gradient.shape[0]), pl.ds(first_column, gradient.shape[1])
        plgpu.copy_smem_to_gmem(smem, ref.at[self.block.batch, rows, self.block.head, columns])


def padded_head_dims(call: AttentionCall, tuning: MosaicBackwardTuning) -> tuple[int, int]:
    """The head dims that the passes work at, of queries and keys, and of values: multiples of 64."""
    # Products and copies of fewer columns weren't tried.
    head_dim, value_dim = (max(64, padded_head_dim(dim)) for dim in (call.head_dim, call.value_dim))
    keeps_both = tuning.one_gradient_per_warpgroup or max(head_dim, value_dim) > MAX_EQUAL_HEAD_DIM
    return (head_dim, value_dim) if keeps_both else (max(head_dim, value_dim),) * 2


class BackwardPass(NamedTuple):
    """A pass over blocks of keys, whose results are dK and dV, or over blocks of queries, whose result is dQ.

    Attributes:
      name: of the kernel's dumps.
      transposed: whether the blocks are of keys.
      scratch: arrays and barriers in shared memory, a named tuple of each.
      producer, consumers: their part of one block.
      finish: the producer's last act, given the barriers and the number of tiles of the program's last block.
      persistent: whether programs take one block after another from a tile scheduler. The barriers have `claims`.
      shift: each block starts this many tiles after the one at which the block before it started; None: with its own
        first tile.
    """

    name: str
    transposed: bool
    scratch: tuple[Any, Any]
    producer: Callable[[BackwardContext], None]
    consumers: Sequence[Callable[[BackwardContext], None]]
    finish: Callable[[Any, Any], None]
    persistent: bool = False
    shift: int | None = None


def launch_pass(
    backward: BackwardPass, arrays: BackwardArrays, call: AttentionCall, tuning: MosaicBackwardTuning, machine: Hopper
) -> list[Any]:
    """Runs a pass, and returns dK and dV, or dQ. The lse of the arrays is natural; the kernel gets it in log₂."""
    transposed, persistent, shift = backward.transposed, backward.persistent, backward.shift
    if arrays.lse is not None:
        arrays = arrays._replace(lse=finite_lse(arrays.lse) * LOG2_E)
    if persistent:
        arrays = arrays._replace(num_claimed=zeroed_ref((1,), jnp.int32, arrays.query))
    # A fused dQ is an operand that is added to; else it is an output or not computed.
    operands: tuple[Any, ...] = arrays[: _D_QUERY + 1] if transposed else arrays[:_D_QUERY]
    outputs = [arrays.key, arrays.value] if transposed else [arrays.query]
    block_length = tuning.block_kv if transposed else tuning.block_q_dq
    heads_per_block = call.group_size if transposed else 1
    num_l2_heads = tuning.num_l2_heads * (1 if transposed else call.group_size)
    batch, length, num_heads, _ = outputs[0].shape
    scheduler = TileScheduler(
        batch,
        num_heads,
        pl.cdiv(length, block_length),
        num_l2_heads,
        last_blocks_first=not transposed,
        num_multiprocessors=machine.num_multiprocessors(call.target) if persistent else None,
    )

    def context_of(program: _PersistentProgram, block: WorkBlock, last_num_steps: Any = 0) -> BackwardContext:
        gmem, smem, barriers, _, warpgroup = program
        tiles = gmem.rows.blocks.read(block.batch, block.number, None if shift is None else block.number * shift)
        first, num_steps = block.number * block_length, heads_per_block * tiles.num_tiles
        return BackwardContext(
            call, tuning, machine, gmem, smem, barriers, warpgroup, block, first, tiles, num_steps, last_num_steps
        )

    def make_context(gmem_refs, smem, barriers, number) -> _PersistentProgram | BackwardContext:
        program = _PersistentProgram(
            BackwardArrays(*gmem_refs), smem, barriers, number, jax.lax.axis_index("warpgroup")
        )
        # A program's only block is the same for all of its roles.
        return program if persistent else context_of(program, scheduler.block(number))

    def for_each_block(role, given: _PersistentProgram | BackwardContext, next_claim):
        num_blocks_in_use = None if given.gmem.num_blocks_in_use is None else given.gmem.num_blocks_in_use[0]
        if isinstance(given, BackwardContext):
            if num_blocks_in_use is None:
                role(given)
                return given.num_steps
            is_in_use = given.block.number < num_blocks_in_use
            pl.when(is_in_use)(lambda: role(given))
            return jnp.where(is_in_use, given.num_steps, 0)

        def visit(block: WorkBlock, last_num_steps):
            context = context_of(given, block, last_num_steps)
            role(context)
            return context.num_steps

        in_use = dataclasses.replace(scheduler, num_blocks_in_use=num_blocks_in_use)
        return in_use.for_each_block(given.number, visit, jnp.int32(0), next_claim)

    def produce(given: _PersistentProgram | BackwardContext) -> None:
        claims = given.barriers.claims if persistent else None
        next_claim = None if claims is None else functools.partial(claims.claim, given.gmem.num_claimed)
        backward.finish(given.barriers, for_each_block(backward.producer, given, next_claim))

    def consume(consumer, given: _PersistentProgram | BackwardContext) -> None:
        claims = given.barriers.claims if persistent else None
        for_each_block(consumer, given, None if claims is None else claims.receive)
        # The copy engine has read what the last block left in shared memory.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    out_type = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs]
    consumers = [functools.partial(consume, consumer) for consumer in backward.consumers]
    return launch(
        Roles(make_context, produce, consumers),
        operands,
        out_type,
        backward.scratch,
        scheduler,
        name=backward.name,
        warpgroups=tuning,
        machine=machine,
    )
