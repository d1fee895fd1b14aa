"""The forward's tiles by how evenly they load the multiprocessors."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from kernels import CausalMask, FullMask, LocalMask, Target
from kernels.backends.mosaic_gpu.makespan import forward_makespan
from kernels.backends.mosaic_gpu.tuning import FORWARD, resolve
from kernels.call import AttentionCall

H200 = Target("gpu", "NVIDIA H200", 9.0, 132)


def make_call(batch, q_len, kv_len, num_heads, num_kv_heads, head_dim, mask, target=H200, *, has_segment_ids=False):
    shape = batch, q_len, kv_len, num_heads, num_kv_heads, head_dim, head_dim
    options = {"has_query_positions": False, "has_key_value_positions": False, "return_lse": False}
    return AttentionCall(
        *shape,
        jnp.dtype("bfloat16"),
        mask,
        head_dim**-0.5,
        logits_soft_cap=None,
        has_sinks=False,
        has_segment_ids=has_segment_ids,
        target=target,
        **options,
    )


def visited_pairs(mask, q_len, kv_len, block_q, block_kv):
    """Of each block of queries: the pairs of the tiles that hold an allowed one, counted over all pairs."""
    allowed = np.asarray(mask(np.arange(q_len)[:, None], np.arange(kv_len)[None]))
    rows, columns = -(-q_len // block_q), -(-kv_len // block_kv)
    padded = np.zeros((rows * block_q, columns * block_kv), bool)
    padded[:q_len, :kv_len] = np.broadcast_to(allowed, (q_len, kv_len))
    tiles = padded.reshape(rows, block_q, columns, block_kv).any((1, 3))
    return tiles.sum(1) * block_q * block_kv


@pytest.mark.parametrize("mask", [FullMask(), CausalMask(), LocalMask(200, 0), CausalMask(-70)], ids=repr)
def test_the_busiest_multiprocessor_by_a_clock(mask, rng):
    num_multiprocessors, num_heads = int(rng.integers(2, 9)), int(rng.integers(1, 4))
    q_len, kv_len = (int(rng.integers(100, 1000)) for _ in range(2))
    block_q, block_kv, num_l2_heads = (
        int(rng.choice([64, 128, 192])),
        int(rng.choice([64, 128])),
        int(rng.integers(1, 5)),
    )
    target = Target("gpu", "NVIDIA H200", 9.0, num_multiprocessors)
    call = make_call(1, q_len, kv_len, num_heads, num_heads, 64, mask, target)
    # As jobs in the order of their start: of some heads at a time all blocks, the last queries first.
    work = visited_pairs(mask, q_len, kv_len, block_q, block_kv) + 200 * block_q
    jobs = [
        int(work[row])
        for first in range(0, num_heads, num_l2_heads)
        for row in reversed(range(len(work)))
        for _ in range(first, min(first + num_l2_heads, num_heads))
    ]
    free_at = np.zeros(num_multiprocessors, int)
    for job in jobs:
        free_at[free_at.argmin()] += job
    actual = forward_makespan(block_q, block_kv, num_l2_heads, call)
    if len(jobs) > 16 * num_multiprocessors:
        assert math.isclose(actual, sum(jobs) / num_multiprocessors)
    else:
        assert actual == free_at.max()


def test_what_a_block_visits_is_unknown_with_documents():
    assert forward_makespan(64, 64, 4, make_call(1, 512, 512, 4, 4, 64, FullMask(), has_segment_ids=True)) is None
    on_cpu = Target("cpu", "cpu", None, None)
    assert forward_makespan(64, 64, 4, make_call(1, 512, 512, 4, 4, 64, FullMask(), on_cpu)) is None


def test_few_blocks_take_the_tiles_that_fill_the_multiprocessors():
    few = {
        # 342 blocks of 192 queries, of unlike work: the last ones leave a tenth of the multiprocessors' time idle.
        "long": make_call(1, 32768, 32768, 2, 2, 128, CausalMask()),
        # 176 blocks of 192 queries are two waves as 256 of 128 are.
        "wide": make_call(1, 4096, 20000, 8, 8, 128, FullMask()),
    }
    for call in few.values():
        assert resolve(None, call).forward_tiles.block_q == 128
    many = make_call(1, 32768, 32768, 16, 16, 128, CausalMask())
    assert resolve(None, many).forward_tiles.block_q == 192


@pytest.mark.parametrize("key", [key for key in FORWARD if key.family != "packed"], ids=repr)
def test_calls_of_many_blocks_take_the_tiles_tuned_for_them(key):
    mask = {"causal": CausalMask(), "full": FullMask(), "window": LocalMask(4095, 0)}[key.family]
    num_heads = 96 if key.length == 4096 else 16
    call = make_call(1, key.length, key.length, num_heads, num_heads, key.head_dim, mask)
    assert resolve(None, call).forward_tiles == FORWARD[key]
