"""Tile schedulers: which blocks a program computes, in which order, and when its warpgroups issue their matmuls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, memref
from jaxtyping import Array, Int

from kernels.hopper.memory import Pipeline

_T = TypeVar("_T")
# A producer claims one block ahead of its consumers.
_CLAIM_SLOTS = 2


class WorkBlock(NamedTuple):
    """A block of rows, within a kernel."""

    batch: jax.Array
    head: jax.Array
    number: jax.Array  # the block's number within its head


@dataclass(frozen=True)
class TileScheduler:
    """Divides blocks among programs. All blocks of some heads come before those of the next heads.

    Neighbouring blocks of a head run at about the same time, and so share their operands in the L2 cache. More blocks
    share them when fewer heads run together; the load is balanced better when more do.

    Without `num_multiprocessors` each block has its own program. With it there is at most one
    persistent program a multiprocessor, which computes one block after another.
    """

    batch: int
    num_heads: int
    num_blocks_per_head: int
    num_l2_heads: int  # number of heads processed together, counted over the batch
    last_blocks_first: bool = True  # under a causal mask the last queries and the first keys have the most work
    num_multiprocessors: int | None = None
    num_blocks_in_use: Any = None  # within a kernel: the number of blocks computed of each head; None: all

    @property
    def num_blocks(self) -> int:
        """Blocks of all programs."""
        return self.batch * self.num_heads * self.num_blocks_per_head

    @property
    def num_programs(self) -> int:
        """Programs to launch."""
        return self.num_blocks if self.num_multiprocessors is None else min(self.num_blocks, self.num_multiprocessors)

    def block(self, index) -> WorkBlock:
        """The index-th block of the schedule."""
        num_heads, num_blocks = self.batch * self.num_heads, self._num_blocks_of_head
        at_once = min(self.num_l2_heads, num_heads)
        group, place = (0, index) if at_once == num_heads else _div_rem(index, at_once * num_blocks)
        # The last group may have fewer heads.
        size = at_once if num_heads % at_once == 0 else jnp.minimum(at_once, num_heads - group * at_once)
        rank, member = _div_rem(place, size)
        batch, head = _div_rem(group * at_once + member, self.num_heads)
        return WorkBlock(batch, head, num_blocks - 1 - rank if self.last_blocks_first else rank)

    def for_each_block(
        self,
        program,
        body: Callable[[WorkBlock, _T], _T],
        start: _T,
        next_claim: Callable[[jax.Array], jax.Array] | None = None,
    ) -> _T:
        """Calls `body(block, carried)` for one block of a program after another, and returns the last result.

        `next_claim(number of blocks done before the last one)` is how many blocks all programs had claimed before the
        program's next one. Without it the schedule is static, and blocks go round the programs.
        """
        if self.num_programs == self.num_blocks and self.num_blocks_in_use is None:
            return body(self.block(program), start)

        def visit(state):
            index, num_done, carried = state
            carried = body(self.block(index), carried)
            num_before = index if next_claim is None else next_claim(num_done)
            return self.num_programs + num_before, num_done + 1, carried

        num_blocks = self.batch * self.num_heads * self._num_blocks_of_head
        return jax.lax.while_loop(lambda state: state[0] < num_blocks, visit, (program, jnp.int32(0), start))[2]

    @property
    def _num_blocks_of_head(self) -> Any:
        return self.num_blocks_per_head if self.num_blocks_in_use is None else self.num_blocks_in_use


class BlockClaims(NamedTuple):
    """Claims of a dynamic persistent tile scheduler, on their way from a program's producer to its consumers.

    Each program claims its next block from a counter in global memory when it is done with one, so that programs with
    short blocks compute more of them.
    """

    claims: Any
    pipeline: Pipeline

    @staticmethod
    def memory(num_consumers: int) -> BlockClaims:
        """The memory that a kernel allocates for claims."""
        return BlockClaims(
            plgpu.SMEM((_CLAIM_SLOTS,), jnp.int32), Pipeline.memory(_CLAIM_SLOTS, num_consumers=num_consumers)
        )

    def claim(self, counter_ref, num_done) -> Int[Array, ""]:
        """The producer's next claim, from the counter in global memory: how many blocks all programs had claimed."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
        def fetch_and_increment(_, counter, result):
            one, zero = mgpu.c(1, ir.IntegerType.get_signless(32)), mgpu.c(0, ir.IndexType.get())
            # Every thread arrives at the barrier that follows. So the value is there when all have arrived.
            with mgpu.single_thread(scope=mgpu.ThreadSubset.WARPGROUP):
                order, pointer = llvm.AtomicOrdering.monotonic, utils.memref_ptr(counter)
                before = llvm.atomicrmw(llvm.AtomicBinOp.add, pointer, one, order, syncscope="device")
                memref.store(before, result, [zero])

        slot = jax.lax.rem(num_done, _CLAIM_SLOTS)
        self.pipeline.producer_acquire(num_done, slot)
        fetch_and_increment(counter_ref, self.claims.at[pl.ds(slot, 1)])
        plgpu.barrier_arrive(self.pipeline.full.at[slot])
        # Only one of the threads that wait here has stored it.
        self.pipeline.consumer_wait(slot)
        return self.claims[slot]

    def receive(self, num_done) -> Int[Array, ""]:
        """The same claim, for a consumer."""
        slot = jax.lax.rem(num_done, _CLAIM_SLOTS)
        self.pipeline.consumer_wait(slot)
        claim = self.claims[slot]
        self.pipeline.consumer_release(slot)
        return claim


class PingPong(NamedTuple):
    """Ping-pong scheduling: consumers issue matmuls one after another, so that one's softmax runs under another's."""

    barriers: Any  # one for each consumer; None if a consumer issues its matmuls whenever it is ready
    warpgroup: Any
    num_consumers: int

    def start(self) -> None:
        """Lets the first consumer issue first. Each consumer calls this once, before anything else."""
        if self.barriers is not None:
            pl.when(self.warpgroup == self.num_consumers - 1)(lambda: plgpu.barrier_arrive(self.barriers.at[0]))

    def acquire(self) -> None:
        """Waits until this consumer may issue its matmuls."""
        if self.barriers is not None:
            plgpu.barrier_wait(self.barriers.at[self.warpgroup])

    def release(self) -> None:
        """Lets the next consumer issue its matmuls."""
        if self.barriers is not None:
            plgpu.barrier_arrive(self.barriers.at[jax.lax.rem(self.warpgroup + 1, self.num_consumers)])

    def finish(self) -> None:
        """Waits for the last consumer's release, as no other wait does. Each consumer calls this once, at the end."""
        if self.barriers is not None:
            pl.when(self.warpgroup == 0)(self.acquire)


def _div_rem(a, b):
    return jax.lax.div(a, b), jax.lax.rem(a, b)
