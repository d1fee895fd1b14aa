"""Compares attention over eight CPU devices with NumPy's, in float64; run as a program by test_context.py.

Prints JSON lines: for each case the largest difference of the output and of each gradient, relative to the largest
value, or why the exchange refuses it.
"""

import itertools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from kernels import (
    BlockwiseTuning,
    CausalMask,
    ChunkedCausalMask,
    LocalMask,
    MaskFn,
    MultiHeadMask,
    PrefixMask,
)
from kernels.context import MeshLayout, attend_over_mesh, deal_tokens
from kernels.context.exchange import EXCHANGES

AXES = ("data", "tensor", "context")
MESHES = [(1, 1, 8), (2, 1, 4), (1, 2, 4), (2, 2, 2)]
LENGTH, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, VALUE_DIM = 96, 8, 4, 6, 5

# The mask, and its definition on (heads, query, key) positions.
MASKS = {
    "causal": (CausalMask(), lambda h, q, k: k <= q),
    "window": (CausalMask() & LocalMask(17, 0), lambda h, q, k: (k <= q) & (q - k <= 17)),
    "both sides": (LocalMask(9, 12), lambda h, q, k: (q - k <= 9) & (k - q <= 12)),
    "chunked": (ChunkedCausalMask(20), lambda h, q, k: (k <= q) & (k // 20 == q // 20)),
    "prefix": (CausalMask() | PrefixMask(13), lambda h, q, k: (k <= q) | (k < 13)),
    "function": (MaskFn(lambda q, k: (k <= q) & ((q - k) % 3 != 1)), lambda h, q, k: (k <= q) & ((q - k) % 3 != 1)),
    "ahead": (LocalMask(-2, 30), lambda h, q, k: (k - q >= 2) & (k - q <= 30)),
    "heads": (
        MultiHeadMask([CausalMask(), CausalMask() & LocalMask(17, 0)] * 4),
        lambda h, q, k: (k <= q) & ((h % 2 == 0) | (q - k <= 17)),
    ),
}


def numpy_attention(query, key, value, allowed, sinks, cap, d_output):
    """Output and gradients by the definition, one head at a time."""
    output, gradients = np.zeros((*query.shape[:3], VALUE_DIM)), [np.zeros_like(x) for x in (query, key, value)]
    d_sinks = np.zeros(NUM_HEADS)
    for b, n in itertools.product(range(len(query)), range(NUM_HEADS)):
        kv = n // (NUM_HEADS // NUM_KV_HEADS)
        q, k, v = query[b, :, n], key[b, :, kv], value[b, :, kv]
        raw = q @ k.T / np.sqrt(HEAD_DIM)
        logits = raw if cap is None else cap * np.tanh(raw / cap)
        weights = np.where(allowed[b, n], np.exp(logits), 0)
        attends = allowed[b, n].any(1)
        total = weights.sum(1) + (0 if sinks is None else np.exp(sinks[n]))
        p = weights / np.where(attends, total, 1)[:, None]
        output[b, :, n] = p @ v
        d_p = d_output[b, :, n] @ v.T
        delta = (p * d_p).sum(1)
        d_logits = p * (d_p - delta[:, None]) * (1 if cap is None else 1 - (logits / cap) ** 2) / np.sqrt(HEAD_DIM)
        gradients[0][b, :, n] += d_logits @ k
        gradients[1][b, :, kv] += d_logits.T @ q
        gradients[2][b, :, kv] += p.T @ d_output[b, :, n]
        if sinks is not None:
            d_sinks[n] -= np.where(attends, np.exp(sinks[n]) / total * delta, 0).sum()
    return output, [*gradients, *([] if sinks is None else [d_sinks])]


def compare(rng, sizes, mask_name, deal, exchange):
    """The differences of one case, with documents, sinks, soft cap and tiles drawn at random."""
    mask, definition = MASKS[mask_name]
    num_ranks, batch = sizes[2], 2 * sizes[0]
    shapes = [(NUM_HEADS, HEAD_DIM), (NUM_KV_HEADS, HEAD_DIM), (NUM_KV_HEADS, VALUE_DIM), (NUM_HEADS, VALUE_DIM)]
    *arrays, d_output = (rng.standard_normal((batch, LENGTH, *shape)) for shape in shapes)
    sinks = rng.standard_normal(NUM_HEADS) if rng.integers(2) else None
    cap = float(rng.uniform(1, 4)) if rng.integers(2) else None

    place = np.tile(np.arange(LENGTH), (batch, 1))
    ids, positions, same = None, place, True
    if rng.integers(4):
        # Among the ids are the lowest that there is, and the highest.
        names = np.array([-(2**31), 2**31 - 1, *rng.choice(2**20, 6, replace=False)], np.int32)
        documents = np.sort(rng.integers(0, 8, (batch, LENGTH)), axis=1)
        ids = rng.permutation(names)[documents]
        positions = np.stack([np.arange(LENGTH) - np.searchsorted(row, row) for row in documents])
        same = ids[:, None, :, None] == ids[:, None, None, :]
    heads = np.arange(NUM_HEADS)[None, :, None, None]
    evaluated_on = place if mask.translation_invariant else positions
    allowed = definition(heads, evaluated_on[:, None, :, None], evaluated_on[:, None, None, :]) & same
    allowed = np.broadcast_to(allowed, (batch, NUM_HEADS, LENGTH, LENGTH))
    expected, expected_gradients = numpy_attention(*arrays, allowed, sinks, cap, d_output)

    places = np.stack(
        [
            deal_tokens(deal, LENGTH, num_ranks, masks={mask: 1.0}, segment_ids=row)
            for row in (ids if ids is not None else [None] * batch)
        ]
    )
    dealt = lambda x: jnp.asarray(np.take_along_axis(x, places.reshape(*places.shape, *[1] * (x.ndim - 2)), axis=1))  # noqa: E731
    mesh = jax.make_mesh(sizes, AXES, (AxisType.Auto,) * 3, devices=jax.devices()[: int(np.prod(sizes))])
    layout = MeshLayout(mesh, ("data",), "context", "tensor", deal)

    def attend(query, key, value, sinks):
        return attend_over_mesh(
            query,
            key,
            value,
            mask,
            layout,
            segment_ids=None if ids is None else dealt(ids),
            positions=None if ids is None or mask.translation_invariant else dealt(positions).astype(jnp.int32),
            places=jnp.asarray(places) if deal == "by_cost" else None,
            sinks=sinks,
            logits_soft_cap=cap,
            implementation=["reference", BlockwiseTuning(16, 24)][rng.integers(2)],
            exchange=exchange,
        )

    @jax.jit
    def run(d_output, *inputs):
        output, pull_back = jax.vjp(attend, *inputs)
        return output, pull_back(d_output)

    inputs = (*map(dealt, arrays), None if sinks is None else jnp.asarray(sinks))
    try:
        output, gradients = run(dealt(d_output), *inputs)
    except ValueError as refusal:
        return {"refused": str(refusal)}
    found = [output, *(x for x in gradients if x is not None)]
    wanted = [dealt(expected), *map(dealt, expected_gradients[:3]), *expected_gradients[3:]]
    differences = [
        float(np.abs(np.asarray(a) - np.asarray(b)).max() / max(np.abs(np.asarray(b)).max(), 1e-30))
        for a, b in zip(found, wanted, strict=True)
    ]
    return {"difference": max(differences)}


def main(seed: int, num_cases: int) -> None:
    jax.config.update("jax_enable_x64", True)
    rng = np.random.default_rng(seed)
    cases = list(itertools.product(MESHES, MASKS, ("in_order", "zigzag", "by_cost"), EXCHANGES))
    rng.shuffle(cases)
    for sizes, mask_name, deal, exchange in cases[:num_cases]:
        result = compare(rng, tuple(map(int, sizes)), str(mask_name), str(deal), str(exchange))
        case = {"mesh": [int(size) for size in sizes], "mask": mask_name, "deal": deal, "exchange": exchange}
        print(json.dumps(case | result), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
