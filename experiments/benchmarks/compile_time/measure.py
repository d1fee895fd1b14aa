"""One case of the compile-time benchmark, measured in a process of its own.

    python -m experiments.benchmarks.compile_time.measure '{"source": "ours", "mask": "causal", …}'

prints the measurement as its last line. No case finds another's work in a cache, and memory is the case's alone. The
cost of the first use in a process (imports, Pallas, JAX's library functions) doesn't count: the same function is first
traced at a small length.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from kernels import CausalMask, LocalMask, Mask, MultiHeadMask, PrefixMask, parse_mask
from trainer.errors import UserMistake
from trainer.hardware import peak_resident_bytes

if TYPE_CHECKING:
    import jax

Source = Literal["dense", "upstream_lazy", "ours"]
"""Where a kernel has its mask from."""

WINDOW = CausalMask() & LocalMask(4095, 0)
# And "two_masks": causal and window_4096 in turn over the heads.
MASKS: dict[str, Mask] = {"causal": CausalMask(), "window_4096": WINDOW, "prefix_1024": CausalMask() | PrefixMask(1024)}

_WARM_UP_LENGTH = 1536


def read_mask(text: str, num_heads: int) -> Mask:
    """A mask by its name, or as Python writes it.

    Raises:
      ValueError: it is neither.
    """
    if text == "two_masks":
        return MultiHeadMask([CausalMask() if head % 2 == 0 else WINDOW for head in range(num_heads)])
    return MASKS[text] if text in MASKS else parse_mask(text)


@dataclass(frozen=True)
class CompileCase:
    """Forward and backward of one attention call, batch 1, bfloat16.

    Attributes:
      mask: a name from MASKS, or as `kernels.parse_mask` reads it.
      target: a topology's name; None: this machine's devices.
    """

    source: Source
    mask: str
    length: int
    target: str | None
    num_heads: int
    num_kv_heads: int
    head_dim: int


def measure(case: CompileCase) -> dict[str, float]:
    """Compiles a case: the seconds of each stage, and the most bytes that were resident.

    Raises:
      UserMistake: the target can't be used.
    """
    import jax

    device = _device(case.target)
    function, arguments = _attention(dataclasses.replace(case, length=_WARM_UP_LENGTH), device)
    function.lower(*arguments)
    jax.config.update("jax_enable_compilation_cache", False)

    function, arguments = _attention(case, device)
    times = [time.perf_counter()]
    traced = function.trace(*arguments)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    lowered.compile()
    times.append(time.perf_counter())
    trace_s, lower_s, compile_s = (end - begin for begin, end in itertools.pairwise(times))
    return {
        "first_trace_s": trace_s,
        "lower_s": lower_s,
        "compile_s": compile_s,
        "peak_bytes": peak_resident_bytes(),
    }


def _device(target: str | None) -> jax.Device:
    if target is None:
        import jax

        return jax.devices()[0]
    from trainer.compile.topology import parse_topology

    return parse_topology(target).devices()[0]


def _attention(case: CompileCase, device: jax.Device) -> tuple[Any, tuple[jax.ShapeDtypeStruct, ...]]:
    """The function of a case, and the shapes of its arguments."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from kernels import dot_product_attention

    mask, implementation = read_mask(case.mask, case.num_heads), "splash" if device.platform == "tpu" else "blockwise"
    sharding = NamedSharding(Mesh(np.array([device]), ("device",)), PartitionSpec())

    def shape(num_heads: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, case.length, num_heads, case.head_dim), jnp.bfloat16, sharding=sharding)

    def loss(query, key, value):
        if case.source == "ours":
            output = dot_product_attention(query, key, value, mask, implementation=implementation, device=device)
        else:
            from experiments.benchmarks.compile_time.upstream import attention

            output = attention(case.source, query, key, value, mask, device)
        return output.astype(jnp.float32).sum()

    key_value = shape(case.num_kv_heads)
    return jax.jit(jax.grad(loss, argnums=(0, 1, 2))), (shape(case.num_heads), key_value, key_value)


def main(request: str) -> int:
    """Measures the case of a JSON object, prints the result and returns the exit status."""
    try:
        print(json.dumps(measure(CompileCase(**json.loads(request)))))
    except UserMistake as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
