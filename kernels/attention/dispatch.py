"""`dot_product_attention`, and the choice of a backend for it and for `kernels.decode_attention`."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, Unpack, overload

import jax
from jaxtyping import Array, Float, Int

from kernels.arguments.instead import OF_MASKS, instead_of
from kernels.attention.core import attend
from kernels.backends import TABLES, Backend, Call, Task, find_backend
from kernels.call import make_call
from kernels.masks import Bounds, Mask

if TYPE_CHECKING:
    from kernels.backends.tuning import Tuning

_log_once = functools.lru_cache(maxsize=256)(logging.getLogger(__name__).info)


class CantServe(ValueError):
    """A backend that was asked for can't serve a call.

    Attributes:
      implementation: its name or tuning object.
      task: of the call: "attention" or "decoding".
      reason: why it can't.
    """

    def __init__(self, implementation: str | Tuning, task: Task, reason: str):
        super().__init__(f"implementation={implementation!r} can't serve this call: {reason}")
        self.implementation, self.task, self.reason = implementation, task, reason


class Selection(NamedTuple):
    """The backend chosen for a call.

    Attributes:
      name: the backend's name in the table.
      passed_over: name and reason of each backend further up in the table that can't serve the call, or is slower.
    """

    name: str
    passed_over: tuple[tuple[str, str], ...]


class LogitsOptions(TypedDict, total=False):
    """Arguments that `dot_product_attention` and `decode_attention` share, for type checkers."""

    scale: float | None
    logits_soft_cap: float | None
    sinks: Array | None
    implementation: str | Tuning | None
    device: jax.Device | None


class AttentionOptions(LogitsOptions, total=False):
    query_segment_ids: Array | None
    key_value_segment_ids: Array | None
    query_positions: Array | None
    key_value_positions: Array | None
    bounds: Bounds | None


@overload
def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    mask: Mask | None = None,
    *,
    return_lse: Literal[True],
    **_: Unpack[AttentionOptions],
) -> tuple[Array, Array]: ...


@overload
def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    mask: Mask | None = None,
    *,
    return_lse: Literal[False] = False,
    **_: Unpack[AttentionOptions],
) -> Array: ...


@instead_of(
    **OF_MASKS,
    query_seq_lengths="use query_segment_ids=segment_ids_of_lengths(lengths, T), from kernels, beside "
    "key_value_segment_ids",
    key_value_seq_lengths="use key_value_segment_ids=segment_ids_of_lengths(lengths, S, padding=-1), from kernels, "
    "beside query_segment_ids, which are 1 where queries have no lengths",
    return_residual="use return_lse=True",
)
def dot_product_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    mask: Mask | None = None,
    *,
    query_segment_ids: Int[Array, "B T"] | None = None,
    key_value_segment_ids: Int[Array, "B S"] | None = None,
    query_positions: Int[Array, "B T"] | None = None,
    key_value_positions: Int[Array, "B S"] | None = None,
    bounds: Bounds | None = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    implementation: str | Tuning | None = None,
    device: jax.Device | None = None,
    return_lse: bool = False,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Scaled dot-product attention whose mask is never an array.

    Differentiable in query, key, value and sinks, once and in reverse mode. Query head n reads key/value head
    n // (N / K). A query that may attend to nothing gets output 0, lse −inf and no gradient.

    NaN isn't hidden. A query that may attend to a logit of NaN or +inf, or whose sink is one, gets output NaN and lse
    NaN, forward and backward. A logit of −inf counts as a pair that may not attend (on some backends one below −10³⁰,
    too). A NaN or an infinity in `value` makes the outputs of the queries that may attend to it NaN or infinite. It can
    also reach other queries where the mask cuts a tile (on GPUs those that may attend to nothing, too), since kernels
    multiply whole tiles by probabilities of 0; so can any NaN in the backward pass. What pads a batch should therefore
    be finite. (`implementation="reference"` leaks no values.)

    Args:
      query, key, value: one floating dtype; N a multiple of K (GQA, MQA). Any lengths.
      mask: which pairs may attend (`kernels.masks`); None allows all. Static under `jax.jit`.
      query_segment_ids, key_value_segment_ids: integers `[B, T]` and `[B, S]`; only equal ids attend. Ids beyond int32
        (hashes) are numbered anew if they are NumPy's, and refused if they are traced. But `jnp.asarray` and `jax.jit`
        cut NumPy's 64-bit integers before they get here, unless `jax_enable_x64` is set.
      query_positions, key_value_positions: where each token stands, `[B, T]` or `[T]`; the mask is
        evaluated on these. Default: `arange`. Given ones are traced, and tiles are then classified on the
        device from their lowest and highest positions. From −2³⁰ to 2³¹ − 1.
      bounds: the keys that each query may attend to, as data (`kernels.Bounds`). Mask, segment ids and bounds all have
        to allow a pair.
      scale: multiplies the logits; default 1/√H. A finite number that isn't traced, like the soft cap.
      logits_soft_cap: bounds the logits to ±cap by cap·tanh(logits/cap) (Gemma 2); positive.
      sinks: one logit per query head that takes part in the softmax but adds no value (arXiv:2309.17453).
      implementation: name of a backend, or a tuning object (`kernels.backends.tuning`), which also says how it runs;
        None for the fastest that serves the call on this device.
      device: one of the devices that the call will be compiled for, when that isn't JAX's default: of a mesh, or
        of a topology that isn't attached (`jax.experimental.topologies`).
      return_lse: also return the log of the softmax's denominator (sinks included), `[B, T, N]`: float32, or float64
        for float64 inputs. Its gradient flows to query, key and sinks, where `jax.nn.dot_product_attention` stops that
        of its residual.

    Returns:
      The output in query's dtype, or (output, lse). Logits and softmax are computed in float32, or in float64 for
      float64 inputs.

    Raises:
      ValueError: arguments that don't fit together, an unknown implementation, or a named implementation
        that can't serve the call (it never falls back).

    Inside `jax.shard_map` all backends but "blockwise" and "reference" need `check_vma=False`; without it they are
    passed over, or refuse.

    >>> from kernels import CausalMask, LocalMask
    >>> x = jax.numpy.ones((1, 1024, 4, 64))
    >>> dot_product_attention(x, x, x, CausalMask() & LocalMask(255, 0)).shape
    (1, 1024, 4, 64)
    """
    inputs, call = make_call(
        query,
        key,
        value,
        mask,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        query_positions=query_positions,
        key_value_positions=key_value_positions,
        bounds=bounds,
        scale=scale,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        return_lse=return_lse,
        device=device,
    )
    backend, tuning = choose_backend(call, implementation)
    output, lse = attend(backend, inputs, call, tuning)
    return (output, lse) if return_lse else output


def choose_backend(call: Call, implementation: str | Tuning | None) -> tuple[Backend, Any]:
    """The backend of a call and the tuning object given for it. Faster backends passed over are logged once."""
    selection = select_backend(call, implementation)
    for name, reason in selection.passed_over:
        _log_once("%s uses %s; %s passed over: %s", call.task, selection.name, name, reason)
    return find_backend(selection.name, call.task), None if isinstance(implementation, str) else implementation


def select_backend(call: Call, implementation: str | Tuning | None = None) -> Selection:
    """The backend that a call gets.

    Args:
      call: the static description of an attention or a decoding call (`kernels.call.make_call`,
        `kernels.decode.call.make_decode_call`), which includes the device.
      implementation: a backend's name or tuning object, or None for the fastest automatic one.

    Raises:
      ValueError: an unknown name.
      CantServe: a named backend that can't serve the call.
    """
    if implementation is not None:
        backend = find_backend(implementation, call.task)
        reason = backend.unsupported_reason(call, None if isinstance(implementation, str) else implementation)
        if reason is not None:
            raise CantServe(implementation, call.task, reason)
        return Selection(backend.name, ())
    passed_over: list[tuple[str, str]] = []
    for backend in TABLES[call.task]:
        if backend.automatic:
            reason = backend.passed_over_reason(call)
            if reason is None:
                return Selection(backend.name, tuple(passed_over))
            passed_over.append((backend.name, reason))
    raise AssertionError(f"no backend serves {call}: blockwise serves every call")
