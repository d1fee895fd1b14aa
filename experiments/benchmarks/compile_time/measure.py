"""One case of the compile-time table, measured in a process of its own.

    python -m experiments.benchmarks.compile_time.measure '{"subject": "attention", "source": "ours", …}'

prints the measurement as its last line. A process of its own, so that memory is the case's alone, and so that no case
finds another's work in a cache. The cost of the first use in a process (imports, Pallas, JAX's library functions)
doesn't count: the same function is first traced at a small length. A trace that is short is repeated; each one is of a
new function, with the caches of masks and plans emptied, so that all that depends on the mask is done anew.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kernels import CausalMask, LocalMask, Mask, MultiHeadMask, PrefixMask, parse_mask
from trainer.errors import UserMistake
from trainer.hardware import peak_resident_bytes, reset_peak, resident_bytes

if TYPE_CHECKING:
    import jax

Subject = Literal["attention", "train_step"]
Source = Literal["dense", "upstream_lazy", "ours"]
"""Where a kernel has its mask from."""

WINDOW = CausalMask() & LocalMask(4095, 0)
# And "two_masks": causal and window_4096 in turn over the heads.
MASKS: dict[str, Mask] = {"causal": CausalMask(), "window_4096": WINDOW, "prefix_1024": CausalMask() | PrefixMask(1024)}

_WARM_UP_LENGTH = 1536
_LONG_TRACE_S = 1.0
# To count tiles of a dense mask means to hash it once more for each pass.
_LONGEST_COUNTED = 16_384


def read_mask(text: str, num_heads: int) -> Mask:
    """A mask by its name, or as Python writes it.

    Raises:
      ValueError: it is neither.
    """
    if text == "two_masks":
        return MultiHeadMask([CausalMask() if head % 2 == 0 else WINDOW for head in range(num_heads)])
    return MASKS[text] if text in MASKS else parse_mask(text)


def our_implementation(platform: str) -> str:
    """The attention backend that is timed on a platform."""
    return "splash" if platform == "tpu" else "blockwise"


@dataclass(frozen=True)
class CompileCase:
    """A program to compile."""

    subject: Subject
    source: Source
    """Source of the kernel's mask."""
    mask: str
    """A name from MASKS, or as `kernels.parse_mask` reads it."""
    length: int
    target: str | None
    """A topology's name; None: this machine's devices."""
    config: str
    """Config file of the training step."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_repeats: int
    """Traces of which the median counts, where one takes less than a second."""


@dataclass(frozen=True)
class Measurement:
    """The cost of compiling a case."""

    trace_s: float
    lower_s: float
    compile_s: float
    first_trace_s: float
    """At this length; later ones find JAX's library functions traced for its shapes."""
    num_traces: int
    fastest_trace_s: float
    slowest_trace_s: float
    trace_peak_bytes: int
    """Most memory that was resident during the first trace, JAX and libtpu themselves included."""
    trace_rise_bytes: int
    """The part of it that tracing added, after the warm-up."""
    peak_bytes: int
    """Most that was resident from then on to the end of compiling."""
    visited_tiles: dict[str, int] | None
    """Tiles of each pass of attention, over all heads; None: not counted (another subject or platform, too long)."""


def measure(case: CompileCase) -> Measurement:
    """Compiles a case, timing each stage.

    Raises:
      UserMistake: the target or the config can't be used.
    """
    import jax

    from trainer.compile.stages import lower_in_stages

    devices = _devices(case.target)
    make = _attention if case.subject == "attention" else _train_step
    function, arguments = make(dataclasses.replace(case, length=_WARM_UP_LENGTH), devices)
    lower_in_stages(function, *arguments)

    def prepare() -> tuple[Any, tuple[Any, ...]]:
        _forget_masks()
        gc.collect()
        return make(case, devices)

    function, arguments = prepare()
    reset_peak()
    before = resident_bytes() or peak_resident_bytes()
    traced, seconds = _trace(function, arguments)
    trace_peak = peak_resident_bytes()
    traces = [seconds]
    while traces[0] < _LONG_TRACE_S and len(traces) < case.num_repeats:
        traced, seconds = _trace(*prepare())
        traces.append(seconds)

    jax.config.update("jax_enable_compilation_cache", False)
    begun = time.perf_counter()
    lowered = traced.lower()
    was_lowered = time.perf_counter()
    lowered.compile()
    compile_s = time.perf_counter() - was_lowered
    peak = peak_resident_bytes()
    return Measurement(
        trace_s=statistics.median(traces),
        lower_s=was_lowered - begun,
        compile_s=compile_s,
        first_trace_s=traces[0],
        num_traces=len(traces),
        fastest_trace_s=min(traces),
        slowest_trace_s=max(traces),
        trace_peak_bytes=trace_peak,
        trace_rise_bytes=trace_peak - before,
        peak_bytes=peak,
        visited_tiles=_visited_tiles(case, arguments, devices[0]),
    )


def _trace(function: Any, arguments: tuple[Any, ...]) -> tuple[Any, float]:
    begun = time.perf_counter()
    traced = function.trace(*arguments)
    return traced, time.perf_counter() - begun


def _devices(target: str | None) -> list[jax.Device]:
    if target is None:
        import jax

        return jax.devices()
    from trainer.compile.topology import parse_topology

    return parse_topology(target).devices()


def _attention(case: CompileCase, devices: list[jax.Device]) -> tuple[Any, tuple[Any, ...]]:
    """Forward and backward of one attention call, batch 1, bfloat16."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from kernels import dot_product_attention

    device = devices[0]
    mask, implementation = read_mask(case.mask, case.num_heads), our_implementation(device.platform)
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


def _train_step(case: CompileCase, devices: list[jax.Device]) -> tuple[Any, tuple[Any, ...]]:
    """The training step of a config, with the mask in all layers."""
    from trainer.config.file import load_config
    from trainer.hardware import compiling_for
    from trainer.step.functions import make_step_functions
    from trainer.step.sharding import make_mesh

    with compiling_for(devices[0].platform):
        config = load_config(Path(case.config))
    model = dataclasses.replace(
        config.model,
        masks=(read_mask(case.mask, config.model.num_heads),),
        implementation=our_implementation(devices[0].platform),
    )
    config = dataclasses.replace(config, model=model, sequence_length=case.length)
    num_devices = 1
    for size in asdict(config.mesh).values():
        num_devices *= size
    functions = make_step_functions(config, make_mesh(config.mesh, devices[:num_devices]))
    return functions.train_step, (functions.abstract_state, functions.abstract_batch)


def _forget_masks() -> None:
    """Empties every cache of masks, plans and traces, ours and upstream's."""
    from kernels.plan import host

    caches: list[Callable] = [host._make_block_plan]
    if "kernels.backends.splash" in sys.modules:
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info

        from kernels.backends.splash import tile_grid

        caches += [tile_grid._visited_steps, splash_attention_mask_info._process_mask]
    if "kernels.backends.mosaic_gpu" in sys.modules:
        from kernels.backends import mosaic_gpu

        caches += [mosaic_gpu.fwd, mosaic_gpu.bwd]
    for cached in caches:
        cached.cache_clear()  # type: ignore[attr-defined]


def _visited_tiles(case: CompileCase, shapes: tuple[Any, ...], device: jax.Device) -> dict[str, int] | None:
    if case.subject != "attention" or device.platform != "tpu" or case.length > _LONGEST_COUNTED:
        return None
    from experiments.benchmarks.compile_time.tiles import count_visited_tiles

    return count_visited_tiles(case.source, read_mask(case.mask, case.num_heads), shapes, device)


if __name__ == "__main__":
    try:
        print(json.dumps(asdict(measure(CompileCase(**json.loads(sys.argv[1]))))))
    except UserMistake as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        sys.exit(2)
