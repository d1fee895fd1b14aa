"""A gather of documents' and windows' keys moves those that another rank needs, and gives them their gradients back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import CausalMask, ChunkedCausalMask, FullMask, LocalMask
from kernels.call import AttentionInputs, make_call
from kernels.context import Split, shard_sequence
from kernels.context.exchanges.needed import NeededChunks, can_leave_any, num_sent

LENGTH, HEADS, FEATURES = 192, 2, 3
MASKS = [
    (CausalMask(), lambda q, k: k <= q),
    (FullMask(), lambda q, k: np.full(np.broadcast_shapes(q.shape, k.shape), True)),
    (CausalMask() & LocalMask(21, 0), lambda q, k: (k <= q) & (q - k <= 21)),
    (LocalMask(5, 9), lambda q, k: (q - k <= 5) & (k - q <= 9)),
    (ChunkedCausalMask(40), lambda q, k: (k <= q) & (k // 40 == q // 40)),
]


def packed_row(rng):
    """Segment ids of documents in any order of ids, and positions in them."""
    lengths = rng.multinomial(LENGTH, rng.dirichlet(np.ones(rng.integers(1, 9))))
    names = rng.choice(2**31 - 1, len(lengths), replace=False) - 2**30
    ids = np.repeat(names, lengths).astype(np.int32)
    return ids, np.concatenate([np.arange(length) for length in lengths])


@pytest.mark.sample(12)
@pytest.mark.parametrize("has_documents", [True, False])
@pytest.mark.parametrize(("mask", "allows"), MASKS, ids=[repr(mask) for mask, _ in MASKS])
@pytest.mark.parametrize("sequence_sharding", ["contiguous", "zigzag", "balanced"])
def test_what_a_query_may_attend_to_is_there_and_gets_its_gradient(sequence_sharding, mask, allows, has_documents, rng):
    batch, num_ranks = 2, int(rng.choice([2, 4]))
    split = Split.of("context", num_ranks, sequence_sharding, LENGTH)
    rows = [packed_row(rng) if has_documents else (np.zeros(LENGTH, np.int32), np.arange(LENGTH)) for _ in range(batch)]
    ids, positions = map(np.stack, zip(*rows, strict=True))
    documents = [{"segment_ids": row} if has_documents else {} for row in ids]
    token_order = np.stack(
        [shard_sequence(sequence_sharding, LENGTH, num_ranks, masks={mask: 1.0}, **each) for each in documents]
    )
    evaluated_on = np.broadcast_to(np.arange(LENGTH), ids.shape) if mask.translation_invariant else positions
    allowed = allows(evaluated_on[:, :, None], evaluated_on[:, None]) & (ids[:, :, None] == ids[:, None])

    def of_ranks(x):
        """[B, T, …] in the row's order to [R, B, t, …]."""
        sharded = np.take_along_axis(x, token_order.reshape(*token_order.shape, *[1] * (x.ndim - 2)), axis=1)
        return jnp.asarray(np.moveaxis(sharded.reshape(batch, num_ranks, -1, *x.shape[2:]), 1, 0))

    keys = rng.standard_normal((batch, LENGTH, HEADS, FEATURES))
    local = jnp.zeros((batch, LENGTH // num_ranks, HEADS, FEATURES))
    nothing = dict.fromkeys(("query_positions", "key_value_positions", "scale", "logits_soft_cap", "sinks"))
    some_ids = jnp.zeros(local.shape[:2], jnp.int32) if has_documents else None
    nothing |= {"query_segment_ids": some_ids, "key_value_segment_ids": some_ids}
    _, call = make_call(local, local, local, mask, **nothing, return_lse=True)
    assert can_leave_any(call, split) == (has_documents or not isinstance(mask, CausalMask | FullMask))
    if not can_leave_any(call, split):
        return

    def on_rank(function, x, ids, token_order):
        inputs = AttentionInputs(
            local, local, local, token_order=token_order if sequence_sharding == "balanced" else None
        )
        chunks = split.chunks(split.sequence_order(inputs), batch)
        return getattr(NeededChunks(call, split, chunks, ids if has_documents else None), function)((x,))[0]

    run = functools.partial(jax.vmap, axis_name="context")
    sharded_ids, sharded_order = of_ranks(ids), of_ranks(np.broadcast_to(np.arange(LENGTH, dtype=np.int32), ids.shape))
    gathered = np.asarray(run(functools.partial(on_rank, "gather"))(of_ranks(keys), sharded_ids, sharded_order))
    gradients = rng.standard_normal((num_ranks, batch, LENGTH, HEADS, FEATURES))
    expected = np.zeros((batch, LENGTH, HEADS, FEATURES))
    for rank, b in np.ndindex(num_ranks, batch):
        own = token_order[b].reshape(num_ranks, -1)[rank]
        attended = allowed[b][own].any(0)
        np.testing.assert_array_equal(gathered[rank, b][attended], keys[b].astype(np.float32)[attended])
        gradients[rank, b][~attended] = 0
        expected[b] += gradients[rank, b]
    sums = run(functools.partial(on_rank, "sum_to_owners"))(jnp.asarray(gradients), sharded_ids, sharded_order)
    np.testing.assert_allclose(np.asarray(sums), np.asarray(of_ranks(expected)), rtol=1e-5, atol=1e-5)


def test_short_documents_send_little(rng):
    # Over two ranks two documents are cut at most, each of one chunk's length.
    length, num_ranks = 16_384, 2
    split = Split.of("context", num_ranks, "balanced", length)
    ids = np.repeat(np.arange(length // split.run_chunk, dtype=np.int32), split.run_chunk)
    ids = np.roll(ids, int(rng.integers(split.run_chunk)))
    ids[: split.run_chunk] = ids[0]
    token_order = shard_sequence("balanced", length, num_ranks, masks={CausalMask(): 1.0}, segment_ids=ids)
    local = jnp.zeros((1, length // num_ranks, 1, 4))
    nothing = dict.fromkeys(("query_positions", "key_value_positions", "scale", "logits_soft_cap", "sinks"))
    some = jnp.zeros(local.shape[:2], jnp.int32)
    _, call = make_call(
        local,
        local,
        local,
        CausalMask(),
        **nothing,
        query_segment_ids=some,
        key_value_segment_ids=some,
        return_lse=True,
    )

    def most(ids, token_order):
        inputs = AttentionInputs(local, local, local, token_order=token_order)
        return NeededChunks(call, split, split.chunks(split.sequence_order(inputs), 1), ids).most

    sharded = [jnp.asarray(x).reshape(num_ranks, 1, -1) for x in (ids[token_order], token_order)]
    assert int(jax.vmap(most, axis_name="context")(*sharded).max()) <= 2


def test_what_is_sent_is_rounded_up_to_a_program():
    assert [num_sent(needed, 128) for needed in (0, 1, 8, 9, 33, 65, 128)] == [8, 8, 8, 16, 64, 128, 128]
    assert [num_sent(needed, 3) for needed in range(4)] == [1, 1, 3, 3]


def test_a_row_that_divides_only_into_tiny_chunks_is_gathered_whole():
    length = 2 * 10_007
    local = jnp.zeros((1, length // 2, 1, 4), jnp.bfloat16)
    nothing = dict.fromkeys(("query_positions", "key_value_positions", "scale", "logits_soft_cap", "sinks"))
    nothing |= dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), jnp.zeros(local.shape[:2], jnp.int32))
    _, call = make_call(local, local, local, CausalMask(), **nothing, return_lse=True)
    assert not can_leave_any(call, Split.of("context", 2, "contiguous", length))
    assert can_leave_any(call._replace(q_len=8192), Split.of("context", 2, "contiguous", 16_384))
