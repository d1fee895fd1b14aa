"""What the backward passes share.

Sources: FlashAttention-3 (arXiv:2407.08608), FlashAttention-2 (arXiv:2307.08691).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels.backends.mosaic_gpu.launch import launch, run_as_consumer, run_as_producer
from kernels.backends.mosaic_gpu.machine import Hopper
from kernels.backends.mosaic_gpu.memory import spread
from kernels.backends.mosaic_gpu.pairs import Tokens
from kernels.backends.mosaic_gpu.tile_scheduler import Block, TileScheduler
from kernels.backends.mosaic_gpu.tuning import MosaicBackwardTuning
from kernels.call import AttentionCall
from kernels.plan import Row, Rows

_LOG2_E = math.log2(math.e)
LSE, DELTA = 0, 1
"""Indices of a query's two numbers in shared memory, `lse_delta`."""

_Smem = TypeVar("_Smem")
_Barriers = TypeVar("_Barriers")


class Operands(NamedTuple):
    """What the passes read, padded to whole tiles and whole head dims.

    `lse` is in units of log₂, and huge where a row attends to nothing. `delta` is rowsum(dO∘O), less the gradient of
    lse.
    """

    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K V"]
    d_output: Float[Array, "B T N V"]
    lse: Float[Array, "B N T"]
    delta: Float[Array, "B N T"]


class Gmem(NamedTuple):
    """Global memory, as references: what `Operands` holds, and what else a pass reads and writes; None for the rest.

    Attributes:
      offsets: columns that stand for lse and delta (`offsets`).
      d_query: an output, or where a pass adds to it, a reference that it is given.
    """

    query: Any
    key: Any
    value: Any
    d_output: Any
    lse: Any
    delta: Any
    offsets: Any
    rows: Rows
    tokens: Tokens
    d_query: Any
    d_key: Any = None
    d_value: Any = None


class Context(NamedTuple, Generic[_Smem, _Barriers]):
    """What every role of a pass knows: the call and how it runs, and one program's block, memory and barriers.

    Attributes:
      block, first: the block that stays in shared memory, and the index of its first query or key.
      walk: the tiles that stream past it.
      num_steps: tiles of all heads that stream past it.
    """

    call: AttentionCall
    tuning: MosaicBackwardTuning
    machine: Hopper
    gmem: Gmem
    smem: _Smem
    barriers: _Barriers
    block: Block
    first: jax.Array
    walk: Row
    num_steps: jax.Array
    warpgroup: jax.Array


def launch_pass(
    call: AttentionCall,
    tuning: MosaicBackwardTuning,
    machine: Hopper,
    scheduler: TileScheduler,
    operands: tuple[Any, ...],
    smem: _Smem,
    barriers: _Barriers,
    *,
    producer: Callable[[Context[_Smem, _Barriers]], None],
    consumers: Sequence[Callable[[Context[_Smem, _Barriers]], None]],
    out_type: Any,
    block_length: int,
    heads_per_block: int,
    shift: int | None = None,
) -> Any:
    """Runs a pass and returns its outputs.

    Args:
      operands, out_type: the first fields of `Gmem`, and the others.
      producer, consumers: the roles; one consumer for all of the warpgroups, or one for each.
      block_length: queries or keys of a block.
      heads_per_block: heads whose tiles stream past a block.
      shift: by how many tiles a block starts later than the one before it; None where the mask staggers them.
    """

    def kernel(*refs):
        *gmem_refs, smem, barriers = refs
        gmem = Gmem(*gmem_refs)
        block = scheduler.block(jax.lax.axis_index("program"))
        warpgroup = jax.lax.axis_index("warpgroup")
        walk = gmem.rows.read(block.batch, block.number, None if shift is None else block.number * shift)
        first, num_steps = block.number * block_length, heads_per_block * walk.num_tiles
        context = Context(call, tuning, machine, gmem, smem, barriers, block, first, walk, num_steps, warpgroup)
        run_as_producer(warpgroup, tuning, functools.partial(producer, context))
        for i, consumer in enumerate(consumers):
            condition = warpgroup < tuning.num_warpgroups if len(consumers) == 1 else warpgroup == i
            run_as_consumer(condition, tuning, functools.partial(consumer, context))

    return launch(
        kernel,
        operands,
        out_type=out_type,
        scratch=(smem, barriers),
        num_programs=scheduler.num_programs,
        num_consumers=tuning.num_warpgroups,
        machine=machine,
    )


def log2_scale(call: AttentionCall) -> float:
    """What brings logits (with a soft cap: tanh of the capped logits) to units of log₂."""
    return _LOG2_E * (call.scale if call.logits_soft_cap is None else call.logits_soft_cap)


def probabilities(logits, lse, call: AttentionCall, keep_allowed: Callable[[jax.Array], jax.Array], *, rows: bool):
    """Probabilities of a tile, and the soft cap's derivative at its logits (None without a cap).

    Args:
      lse: of the rows or columns, in units of log₂; None if it was subtracted from the logits before.
      keep_allowed: sets the logits of pairs that may not attend to −inf.
    """
    cap, slope = call.logits_soft_cap, None
    if cap is not None:
        logits = jnp.tanh(logits * (call.scale / cap))
        slope = 1 - logits * logits
    exponent = keep_allowed(logits) * log2_scale(call)
    return jnp.exp2(exponent if lse is None else exponent - spread(lse, logits.shape, rows=rows)), slope
