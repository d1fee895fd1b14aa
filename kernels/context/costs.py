"""The cost of an exchange: the bytes that a device receives and holds.

Dimensions: B batch, t tokens of a rank, T = t·R tokens of a sequence, N query heads, K key/value heads, all of one
device.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, NamedTuple

from kernels.call import AttentionCall
from kernels.context.exchanges.halo import halo_of, reach_of
from kernels.context.exchanges.needed import can_leave_any, num_sent
from kernels.context.exchanges.ring import documents_bound_hops, num_hops
from kernels.context.split import Split
from kernels.tracing.target import Target

Exchange = Literal["all_gather", "peer", "halo", "ring", "all_to_all"]
"""all_gather: every rank gets the keys that any rank needs. peer: a few GPUs read the keys that they need from each
other's memory. halo: each rank gets the keys within the windows' reach. ring: keys travel from rank to rank.
all_to_all: each rank gets whole sequences of some heads."""


# Of a device, from the data sheets at nvidia.com/en-us/data-center and docs.cloud.google.com/tpu/docs.
_MEMORY_BYTES = (
    (r"NVIDIA B200", 180e9),
    (r"NVIDIA (GH|H)200.*", 141e9),
    (r"NVIDIA H100.*", 80e9),
    (r"NVIDIA A100.*", 80e9),
    (r"TPU v4", 32e9),
    (r"TPU (v5e|v5 lite)", 16e9),
    (r"TPU (v5p|v5)", 95e9),
    (r"TPU (v6e|v6 lite)", 32e9),
)
_OTHER_MEMORY_BYTES = 16e9
# Keys of other ranks take no more of a device's memory than this, parameters and activations being the rest.
_MOST_OF_MEMORY = 0.15
# Documents are known at run time only. These numbers of tokens stand for them: a token of packed documents has so many
# tokens of its document before it, and the longest document of a batch is this long.
_TOKENS_BEFORE = 3_000
_LONGEST_DOCUMENT = 50_000
# The runs of consecutive tokens that a rank has with `balanced`, about.
_RUNS_OF_BALANCED = 2


class ExchangeCost(NamedTuple):
    """Of one layer on one device.

    Attributes:
      received_bytes: in the forward pass and in the backward pass.
      held_bytes: at most at one time, of keys and values of other ranks, or their gradients.
      fits: whether `held_bytes` leave enough memory.
    """

    received_bytes: tuple[float, float]
    held_bytes: float
    fits: bool


def memory_bytes(target: Target) -> float:
    """The memory of a device of this kind."""
    sizes = (size for pattern, size in _MEMORY_BYTES if re.fullmatch(pattern, target.device_kind))
    return next(sizes, _OTHER_MEMORY_BYTES)


class _Bytes(NamedTuple):
    """Of an exchange, on one device.

    Attributes:
      forward: received in the forward pass.
      backward: received in the backward pass, where a remat policy computes the layer again.
      kept: the part of `backward` that the forward pass leaves, where no policy does so.
      held: at most at one time.
    """

    forward: float
    backward: float
    kept: float
    held: float


def exchange_cost(name: Exchange, call: AttentionCall, split: Split, *, remat: bool = True) -> ExchangeCost:
    """The cost of an exchange that serves the call.

    Args:
      name: the exchange.
      call: of one device.
      split: of the sequences.
      remat: whether a remat policy computes the layer again in the backward pass.

    Returns:
      The cost of one layer.
    """
    forward, backward, kept, held = _BYTES[name](call, split)
    received_bytes = forward, backward if remat else backward - kept
    return ExchangeCost(received_bytes, held, held <= _MOST_OF_MEMORY * memory_bytes(call.target))


def _key_bytes(call: AttentionCall, num_tokens: float, num_heads: int, itemsize: int) -> float:
    return call.batch * num_tokens * num_heads * (call.head_dim + call.value_dim) * itemsize


def _all_gather_bytes(call: AttentionCall, split: Split) -> _Bytes:
    itemsize, sum_itemsize = call.dtype.itemsize, call.softmax_dtype.itemsize
    sent = _tokens_sent(call, split)
    others = (split.num_ranks - 1) * sent
    forward = _key_bytes(call, others, call.num_kv_heads, itemsize)
    backward = forward + _key_bytes(call, others, call.num_kv_heads, sum_itemsize)
    # In the order of the ranks, and in the sequence's order, which may be the same.
    in_order = split.sequence_sharding == "contiguous" and sent == call.q_len
    received = _key_bytes(call, split.num_ranks * sent, call.num_kv_heads, itemsize + sum_itemsize)
    whole = 0.0 if in_order else _key_bytes(call, split.length, call.num_kv_heads, 2 * itemsize)
    return _Bytes(forward, backward, forward, received + whole)


def _tokens_sent(call: AttentionCall, split: Split) -> int:
    """How many of its tokens' keys a rank sends to all others in an all-gather, about."""
    if not can_leave_any(call, split):
        return call.q_len
    num_chunks = min(call.q_len, 128)
    needed = -(-_tokens_needed(call, split) * num_chunks // call.q_len)
    return num_sent(needed, num_chunks) * call.q_len // num_chunks


def _tokens_needed(call: AttentionCall, split: Split) -> int:
    """How many of a rank's tokens' keys another rank needs, about."""
    return min(call.q_len, _tokens_before(call, split))


def _tokens_before(call: AttentionCall, split: Split) -> int:
    """How many tokens' keys a rank needs that lie before its runs, about."""
    reach = sum(reach_of(call) or (split.length, 0))
    if call.has_segment_ids:
        reach = min(reach, _TOKENS_BEFORE)
    return (split.num_runs or _RUNS_OF_BALANCED) * reach


def _peer_bytes(call: AttentionCall, split: Split) -> _Bytes:
    num_tokens = min((split.num_ranks - 1) * call.q_len, _tokens_before(call, split))
    needed = _key_bytes(call, num_tokens, call.num_kv_heads, call.dtype.itemsize)
    # The kernel's whole sequences of keys and values, and their gradients.
    held = 2 * _key_bytes(call, split.length, call.num_kv_heads, call.dtype.itemsize)
    return _Bytes(needed, 2 * needed, needed, held)


def _halo_bytes(call: AttentionCall, split: Split) -> _Bytes:
    num_runs = split.num_runs or 1
    num_tokens = num_runs * sum(halo_of(call, call.q_len // num_runs))
    forward = _key_bytes(call, num_tokens, call.num_kv_heads, call.dtype.itemsize)
    # Gradients come back in the keys' dtype, and are added up in the softmax's.
    return _Bytes(forward, 2 * forward, forward, 2 * forward)


def _ring_bytes(call: AttentionCall, split: Split) -> _Bytes:
    hops, hops_home = _ring_hops(call, split)
    keys = _hop_bytes(call)
    gradients = _key_bytes(call, call.q_len, call.num_kv_heads, call.softmax_dtype.itemsize)
    # They go home in the keys' dtype. XLA keeps what came by the first hop, which is outside of the loop over hops.
    backward = (hops + hops_home) * keys + hops * gradients
    return _Bytes(hops * keys, backward, min(hops, 1) * keys, 2 * (keys + gradients))


def _ring_hops(call: AttentionCall, split: Split) -> tuple[int, int]:
    """The hops of keys, and the hops that take their gradients home, about."""
    hops = num_hops(call, split) - 1
    if not documents_bound_hops(call, split):
        return hops, 1
    hops = min(hops, -(-_LONGEST_DOCUMENT // call.q_len))
    return hops, min(hops, split.num_ranks - hops)


def _hop_bytes(call: AttentionCall) -> float:
    return _key_bytes(call, call.q_len, call.num_kv_heads, call.dtype.itemsize)


def _all_to_all_bytes(call: AttentionCall, split: Split) -> _Bytes:
    queries = call.batch * call.q_len * call.num_heads * (call.head_dim + call.value_dim) * call.dtype.itemsize
    num_kv_heads = max(call.num_kv_heads, split.num_ranks)
    keys = _key_bytes(call, call.q_len, num_kv_heads, call.dtype.itemsize)
    delta = call.batch * call.q_len * call.num_heads * call.softmax_dtype.itemsize
    from_others = (split.num_ranks - 1) / split.num_ranks
    forward = (queries + keys) * from_others
    # The output's gradient and delta, and the gradients of queries, keys and values back.
    backward = (queries + keys + delta) * from_others
    # The backward pass has the queries and keys that came in the forward pass.
    return _Bytes(forward, backward, 0.0, 2 * (queries + keys))


_BYTES: dict[Exchange, Callable[[AttentionCall, Split], _Bytes]] = {
    "all_gather": _all_gather_bytes,
    "peer": _peer_bytes,
    "halo": _halo_bytes,
    "ring": _ring_bytes,
    "all_to_all": _all_to_all_bytes,
}
