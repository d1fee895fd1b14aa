"""The Mosaic GPU kernels' tile scheduler: each block is computed once, in an order that shares the L2 cache."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.hopper.tile_scheduler import TileScheduler


def visits(scheduler: TileScheduler, program):
    """How often a program makes each block `[batch, head, number]`."""
    sizes = scheduler.batch, scheduler.num_heads, scheduler.num_blocks_per_head

    def make(block, made):
        # A block that there isn't counts as another one, once too often.
        return made.at[block.batch, block.head, block.number].add(1, mode="clip")

    return scheduler.for_each_block(program, make, jnp.zeros(sizes, jnp.int32))


@pytest.mark.parametrize(
    ("num_l2_heads", "last_blocks_first", "num_multiprocessors"),
    [(100, True, None), (100, True, 7), (100, True, 1000), (1, False, None), (3, True, 7), (100, False, 7)],
)
def test_programs_make_each_block_once(num_l2_heads, last_blocks_first, num_multiprocessors, rng):
    sizes = tuple(map(int, rng.integers(1, 6, 3)))
    scheduler = TileScheduler(*sizes, num_l2_heads, last_blocks_first, num_multiprocessors)
    by_program = jax.vmap(lambda program: visits(scheduler, program))(jnp.arange(scheduler.num_programs))
    np.testing.assert_array_equal(by_program.sum(0), np.ones(sizes))
    num_made = by_program.sum((1, 2, 3))
    assert num_made.max() - num_made.min() <= 1
    assert scheduler.num_programs <= (num_multiprocessors or np.prod(sizes))


@pytest.mark.parametrize(("num_l2_heads", "last_blocks_first"), [(100, False), (1, False), (3, True)])
@pytest.mark.parametrize("num_multiprocessors", [2, 7, 1000])
def test_programs_make_each_block_in_use_once(num_l2_heads, last_blocks_first, num_multiprocessors, rng):
    sizes = tuple(map(int, rng.integers(1, 6, 3)))
    num_in_use = int(rng.integers(0, sizes[-1] + 1))
    scheduler = TileScheduler(*sizes, num_l2_heads, last_blocks_first, num_multiprocessors)
    in_use = dataclasses.replace(scheduler, num_blocks_in_use=jnp.int32(num_in_use))
    by_program = jax.vmap(lambda program: visits(in_use, program))(jnp.arange(scheduler.num_programs))
    expected = np.broadcast_to(np.arange(sizes[-1]) < num_in_use, sizes)
    np.testing.assert_array_equal(by_program.sum(0), expected)


@pytest.mark.parametrize("last_blocks_first", [True, False])
def test_some_heads_come_before_the_others_and_their_blocks_side_by_side(last_blocks_first):
    scheduler = TileScheduler(2, 4, 5, num_l2_heads=3, last_blocks_first=last_blocks_first)
    blocks = [tuple(map(int, scheduler.block(jnp.int32(index)))) for index in range(scheduler.num_blocks)]
    rows = list(range(5))[:: -1 if last_blocks_first else 1]
    heads = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert blocks == [(*head, row) for at in (0, 3, 6) for row in rows for head in heads[at : at + 3]]
