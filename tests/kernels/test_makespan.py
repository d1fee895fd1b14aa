"""The forward's tiles by how evenly they load the multiprocessors."""

import jax.numpy as jnp
import numpy as np
import pytest

from kernels import CausalMask, ChunkedCausalMask, FullMask, LocalMask, MaskFn, MultiHeadMask, Target
from kernels.backends.mosaic_gpu.makespan import makespan_of_few_blocks
from kernels.backends.mosaic_gpu.tuning import FORWARD, MosaicGpuTuning, TunedCall, resolve
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


@pytest.mark.parametrize("mask", [FullMask(), CausalMask(), LocalMask(200, 0), CausalMask(-70), ChunkedCausalMask(150)])
def test_the_busiest_multiprocessor_by_a_clock(mask, rng):
    num_multiprocessors = int(rng.integers(2, 33))
    batch, num_kv_heads, group_size = (int(rng.integers(1, 4)) for _ in range(3))
    q_len, kv_len = (int(rng.integers(100, 1000)) for _ in range(2))
    block_q, block_kv, num_l2_heads = (
        int(rng.choice([64, 128, 192])),
        int(rng.choice([64, 128])),
        int(rng.integers(1, 5)),
    )
    target = Target("gpu", "NVIDIA H200", 9.0, num_multiprocessors)
    num_heads = num_kv_heads * group_size
    call = make_call(batch, q_len, kv_len, num_heads, num_kv_heads, 64, mask, target)
    # As jobs in the order of their start: of some key/value heads' queries at a time all blocks, the last ones first.
    work = visited_pairs(mask, q_len, kv_len, block_q, block_kv) + 200 * block_q
    heads = np.arange(batch * num_heads)
    jobs = [
        int(work[row])
        for first in range(0, len(heads), num_l2_heads * group_size)
        for row in reversed(range(len(work)))
        for _ in heads[first : first + num_l2_heads * group_size]
    ]
    free_at = np.zeros(num_multiprocessors, int)
    for job in jobs:
        free_at[free_at.argmin()] += job
    expected = None if len(jobs) > 4 * num_multiprocessors else free_at.max()
    assert makespan_of_few_blocks(block_q, block_kv, num_l2_heads, call) == expected


SEVERAL = MultiHeadMask([CausalMask(), FullMask()])


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("packed", {"has_segment_ids": True}),
        ("packed", {"has_query_positions": True}),
        ("causal", {"target": Target("gpu", "NVIDIA H200", 9.0, None)}),
        ("causal", {"mask": MaskFn(lambda q, kv: q % 7 >= kv % 7)}),
        ("causal", {"mask": ~LocalMask(100, 0)}),
        ("causal", {"mask": SEVERAL, "num_heads": 2, "num_kv_heads": 2}),
    ],
    ids=repr,
)
def test_the_likest_calls_tiles_where_the_makespan_is_unknown(head_dim, family, changes):
    call = make_call(1, 32768, 32768, 2, 2, head_dim, CausalMask())._replace(**changes)
    expected = FORWARD[TunedCall(head_dim, family, 32768)]
    assert makespan_of_few_blocks(expected.block_q, expected.block_kv, 4, call) is None
    assert resolve(None, call).forward_tiles == expected
    assert resolve(MosaicGpuTuning(backward="split"), call).forward_tiles == expected


def test_few_blocks_take_the_tiles_that_fill_the_multiprocessors():
    few = {
        # 342 blocks of 192 queries, of unlike work: the last ones leave a tenth of the multiprocessors' time idle.
        "long": make_call(1, 32768, 32768, 2, 2, 128, CausalMask()),
        # 176 blocks of 192 queries are two waves as 256 of 128 are.
        "wide": make_call(1, 4096, 20000, 8, 8, 128, FullMask()),
    }
    for call in few.values():
        assert resolve(None, call).forward_tiles.block_q == 128
    # With more blocks less is idle, though the last one of 1,024 queries sticks out far. Those of a window are alike.
    many = make_call(1, 32768, 32768, 16, 16, 128, CausalMask())
    short = make_call(16, 1024, 1024, 16, 16, 128, CausalMask())
    window = make_call(8, 4096, 4096, 16, 16, 128, LocalMask(1023, 0))
    few_of_a_window = make_call(1, 16384, 16384, 8, 8, 128, LocalMask(1023, 0))
    for call in (many, short, window, few_of_a_window):
        assert resolve(None, call).forward_tiles.block_q == 192


@pytest.mark.parametrize("key", FORWARD, ids=repr)
def test_calls_of_many_blocks_take_the_tiles_tuned_for_them(key):
    length = 32768 if key.family == "narrow_window" else key.length  # its length is the window's
    windows = {"window": LocalMask(4095, 0), "narrow_window": LocalMask(key.length - 1, 0)}
    mask = {"full": FullMask(), **windows}.get(key.family, CausalMask())
    num_heads, packed = 16 * 32768 // length, key.family == "packed"
    head_dim, value_dim = {160: (192, 128)}.get(key.head_dim, (key.head_dim, key.head_dim))  # two are tuned as one
    call = make_call(1, length, length, num_heads, num_heads, head_dim, mask, has_segment_ids=packed)
    assert resolve(None, call._replace(value_dim=value_dim)).forward_tiles == FORWARD[key]
