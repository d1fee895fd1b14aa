"""What the backward passes share, and the pass for dQ alone.

Sources: FlashAttention-3 (arXiv:2407.08608), FlashAttention-2 (arXiv:2307.08691).
"""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from kernels.backends.mosaic_gpu.machine import Hopper, add_product, launch
from kernels.backends.mosaic_gpu.memory import Pipeline, matrix, padded_head_dim
from kernels.backends.mosaic_gpu.registers import WGMMA_ROWS, accumulator, load_vector, spread
from kernels.backends.mosaic_gpu.tile_mask import TileMask, TokenArrays, num_token_arrays, token_memory
from kernels.backends.mosaic_gpu.tile_scheduler import TileScheduler, WorkBlock
from kernels.backends.mosaic_gpu.tuning import MosaicBackwardTuning
from kernels.call import AttentionCall
from kernels.plan import Row, Rows

LSE, DELTA = 0, 1
"""Indices of a query's two numbers in shared memory, `lse_delta`."""


class BackwardArrays(NamedTuple):
    """What the passes read and write, padded to whole head dims, and rows of numbers to whole tiles.

    Within a kernel, references to it.
    """

    query: Any
    key: Any
    value: Any
    d_output: Any
    lse: Any  # float32 `[B, N, T]` in units of log₂, and huge where a row attends to nothing
    delta: Any  # float32 `[B, N, T]`: rowsum(dO∘O), less the gradient of lse
    offsets: Any  # columns that stand for lse and delta (`offset_columns`); None where a pass reads these
    rows: Rows  # the tiles of each block
    tokens: TokenArrays
    d_query: Any = None  # an output, or the reference that a fused pass adds to
    d_key: Any = None
    d_value: Any = None


SmemT = TypeVar("SmemT", bound=Any)
BarriersT = TypeVar("BarriersT", bound=Any)


class BackwardContext(NamedTuple, Generic[SmemT, BarriersT]):
    """What every role of a pass knows: the call and how it runs, and one program's block, memory and barriers."""

    call: AttentionCall
    tuning: MosaicBackwardTuning
    machine: Hopper
    gmem: BackwardArrays
    smem: SmemT
    barriers: BarriersT
    block: WorkBlock  # the block that stays in shared memory
    first: jax.Array  # index of the block's first query or key
    tiles: Row  # the tiles that the block visits, of one head
    num_steps: jax.Array  # number of tiles of all heads
    warpgroup: jax.Array

    def query_tile(self, step) -> tuple[Any, Any, Any]:
        """The query tile of a step: its head, its number in that head, and its rank among the block's tiles there.

        All tiles of one of the group's heads come before the next head's. So programs that run at the same time read
        the same head, and share its tiles in the L2 cache.
        """
        member = jax.lax.div(step, self.tiles.num_tiles)
        rank = step - member * self.tiles.num_tiles
        return self.block.head * self.call.group_size + member, self.tiles.tile(rank), rank

    def load_keys_and_values(self, first) -> None:
        """Starts to copy the block's keys and values, from the key of index `first` on; they have a barrier each."""
        batch, head, _ = self.block
        keys = pl.ds(first, self.tuning.block_kv)
        plgpu.copy_gmem_to_smem(self.gmem.key.at[batch, keys, head], self.smem.k, self.barriers.k)
        plgpu.copy_gmem_to_smem(self.gmem.value.at[batch, keys, head], self.smem.v, self.barriers.v)

    def wait_for_consumers(self) -> None:
        """Waits until no consumer reads the block's keys and values any more."""
        plgpu.barrier_arrive(self.barriers.done)
        plgpu.barrier_wait(self.barriers.done)

    def store_gradient(self, gradient, smem, ref, first) -> None:
        """Starts to write a gradient of a block's queries, keys or values from `first` on, through shared memory."""
        smem[...] = gradient.astype(self.call.dtype)
        plgpu.commit_smem()
        rows = pl.ds(first, gradient.shape[0])
        plgpu.copy_smem_to_gmem(smem, ref.at[self.block.batch, rows, self.block.head])


def padded_head_dims(call: AttentionCall, tuning: MosaicBackwardTuning) -> tuple[int, int]:
    """The head dims that the passes work at, of queries and keys, and of values: multiples of 64."""
    # The halves of a fused dQ are 64 wide, too.
    head_dim, value_dim = (max(64, padded_head_dim(dim)) for dim in (call.head_dim, call.value_dim))
    return (head_dim, value_dim) if tuning.one_gradient_per_warpgroup else (max(head_dim, value_dim),) * 2


def launch_pass(
    arrays: BackwardArrays,
    call: AttentionCall,
    tuning: MosaicBackwardTuning,
    machine: Hopper,
    scratch: tuple[Any, Any],
    producer: Callable[[BackwardContext], None],
    consumers: Sequence[Callable[[BackwardContext], None]],
    *,
    name: str,
    transposed: bool,
    shift: int | None = None,
) -> list[Any]:
    """Runs a pass over blocks of keys (`transposed`) and returns dK and dV, or over blocks of queries for dQ alone.

    Each block starts `shift` tiles after the one at which the block before it started; None: with its own first tile.
    """
    operands: tuple[Any, ...] = arrays[:10] if transposed else arrays[:9]
    outputs = [arrays.key, arrays.value] if transposed else [arrays.query]
    block_length = tuning.block_kv if transposed else tuning.block_q_dq
    heads_per_block = call.group_size if transposed else 1
    num_l2_heads = tuning.num_l2_heads * (1 if transposed else call.group_size)
    batch, length, num_heads, _ = outputs[0].shape
    num_blocks = pl.cdiv(length, block_length)
    scheduler = TileScheduler(batch, num_heads, num_blocks, num_l2_heads, last_blocks_first=not transposed)

    def make_context(gmem_refs, smem, barriers, program):
        gmem, block = BackwardArrays(*gmem_refs), scheduler.block(program)
        warpgroup = jax.lax.axis_index("warpgroup")
        tiles = gmem.rows.read(block.batch, block.number, None if shift is None else block.number * shift)
        first, num_steps = block.number * block_length, heads_per_block * tiles.num_tiles
        return BackwardContext(call, tuning, machine, gmem, smem, barriers, block, first, tiles, num_steps, warpgroup)

    out_type = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs]
    return launch(
        make_context,
        producer,
        consumers,
        operands,
        out_type,
        scratch,
        scheduler,
        name=name,
        tuning=tuning,
        machine=machine,
    )


QuerySmem = namedtuple("QuerySmem", "q do lse_delta k v tokens ds")


class QueryBarriers(NamedTuple):
    """Barriers: of a consumer's queries and what belongs to them, and for each stage of k and v."""

    queries: Any
    k: Pipeline
    v: Pipeline


QueryContext = BackwardContext[QuerySmem, QueryBarriers]


def query_scratch(
    call: AttentionCall, tuning: MosaicBackwardTuning, machine: Hopper
) -> tuple[QuerySmem, QueryBarriers]:
    """Shared memory and barriers: rings of stages for k, v and tokens; of the rest each consumer has its own."""
    head_dim, value_dim = padded_head_dims(call, tuning)
    num_consumers, block_kv, num_stages = tuning.num_warpgroups, tuning.block_kv_dq, tuning.num_stages_dq
    smem = QuerySmem(
        q=matrix(num_consumers, WGMMA_ROWS, head_dim, dtype=call.dtype),
        do=matrix(num_consumers, WGMMA_ROWS, value_dim, dtype=call.dtype),
        lse_delta=plgpu.SMEM((2, num_consumers, WGMMA_ROWS), jnp.float32),
        k=matrix(num_stages, block_kv, head_dim, dtype=call.dtype),
        v=matrix(tuning.num_value_stages_dq, block_kv, value_dim, dtype=call.dtype),
        tokens=token_memory(call, num_stages, block_kv),
        ds=machine.operand_memory(num_consumers, WGMMA_ROWS, block_kv, dtype=call.dtype),
    )
    return smem, QueryBarriers(
        queries=plgpu.Barrier(num_arrivals=4, num_barriers=num_consumers),
        k=Pipeline.memory(num_stages, num_consumers=num_consumers, num_copies=1 + num_token_arrays(call)),
        v=Pipeline.memory(tuning.num_value_stages_dq, num_consumers=num_consumers),
    )


def query_pass(
    arrays: BackwardArrays, call: AttentionCall, tuning: MosaicBackwardTuning, machine: Hopper
) -> Float[Array, "B T N H"]:
    """dQ alone, scaled, in the query's dtype. `arrays.rows` are each query block's key/value tiles, in fixed order."""
    scratch = query_scratch(call, tuning, machine)
    (d_query,) = launch_pass(
        arrays, call, tuning, machine, scratch, _load, [_differentiate], name="attention_dq", transposed=False
    )
    return d_query


def _load(context: QueryContext) -> None:
    """Producer: copies the key/value tiles of the block into the rings."""
    tuning, gmem, smem = context.tuning, context.gmem, context.smem
    barriers, block, num_steps = context.barriers, context.block, context.num_steps
    kv_head = block.head // context.call.group_size

    @pl.loop(0, num_steps)
    def copy_tile(step):
        tile = pl.ds(context.tiles.tile(step) * tuning.block_kv_dq, tuning.block_kv_dq)
        slot = barriers.k.slot(step)
        barriers.k.producer_acquire(step, slot)
        barriers.k.copy(gmem.key.at[block.batch, tile, kv_head], smem.k, slot)
        # Before the wait for the values' stage: keys are full only with their tokens.
        gmem.tokens.copy(smem.tokens, "key_value", (block.batch, tile), slot, barriers.k.full.at[slot])
        slot = barriers.v.slot(step)
        barriers.v.producer_acquire(step, slot)
        barriers.v.copy(gmem.value.at[block.batch, tile, kv_head], smem.v, slot)

    barriers.k.producer_tail(num_steps)
    barriers.v.producer_tail(num_steps)


def _differentiate(context: QueryContext) -> None:
    """Consumer: dQ of 64 query rows."""
    gmem, smem, block, warpgroup = context.gmem, context.smem, context.block, context.warpgroup
    first = block.number * context.tuning.block_q_dq + warpgroup * WGMMA_ROWS
    rows, full = pl.ds(first, WGMMA_ROWS), context.barriers.queries.at[warpgroup]
    for source, target in (
        (gmem.query.at[block.batch, rows, block.head], smem.q.at[warpgroup]),
        (gmem.d_output.at[block.batch, rows, block.head], smem.do.at[warpgroup]),
        (gmem.lse.at[block.batch, block.head, rows], smem.lse_delta.at[LSE, warpgroup]),
        (gmem.delta.at[block.batch, block.head, rows], smem.lse_delta.at[DELTA, warpgroup]),
    ):
        plgpu.copy_gmem_to_smem(source, target, full)
    mask = TileMask.load(context, "key_value", block.batch, rows, context.tuning.block_kv_dq)
    plgpu.barrier_wait(full)
    lse = load_vector(smem.lse_delta.at[LSE, warpgroup], rows=True)
    delta = load_vector(smem.lse_delta.at[DELTA, warpgroup], rows=True)

    def accumulate(dq_acc):
        pl.loop(0, context.num_steps)(functools.partial(_add_tile, context, mask, lse, delta, dq_acc))
        dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=0) * context.call.scale
        context.store_gradient(dq, smem.q.at[warpgroup], gmem.d_query, first)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    pl.run_scoped(accumulate, accumulator(gmem.query.shape[-1]))


def _add_tile(context: QueryContext, mask: TileMask, lse, delta, dq_acc, step) -> None:
    """Adds a tile's part to dQ: P = exp(QKᵀ − lse), dS = P∘(dO Vᵀ − delta), dQ += dS K."""
    smem, barriers, tiles = context.smem, context.barriers, context.tiles
    slot, v_slot = barriers.k.slot(step), barriers.v.slot(step)
    k, v = smem.k.at[slot], smem.v.at[v_slot]
    # The barrier makes the compiler compute the operands' addresses in each step. Kept across steps, the addresses of
    # wide operands fill a thread's registers.
    warpgroup = jax.lax.optimization_barrier(context.warpgroup)
    q, do = smem.q.at[warpgroup], smem.do.at[warpgroup]

    def differentiate(s_acc, dp_acc):
        plgpu.wgmma(dp_acc, do, v.transpose((1, 0)))
        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
        kv_first = tiles.tile(step) * context.tuning.block_kv_dq
        p, slope = mask.probabilities(s, lse, step < tiles.num_partial, kv_first, slot)
        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
        barriers.v.consumer_release(v_slot)
        ds = p * (dp - spread(delta, dp.shape, rows=True))
        return (ds if slope is None else ds * slope).astype(context.call.dtype)

    def multiply(s_acc):
        plgpu.wgmma(s_acc, q, k.transpose((1, 0)))
        barriers.v.consumer_wait(v_slot)
        return pl.run_scoped(functools.partial(differentiate, s_acc), tile_type)

    tile_type = accumulator(context.tuning.block_kv_dq)
    barriers.k.consumer_wait(slot)
    ds = pl.run_scoped(multiply, tile_type)
    add_product(dq_acc, ds, k, smem.ds, context.warpgroup)
    plgpu.wgmma_wait(0)
    barriers.k.consumer_release(slot)
