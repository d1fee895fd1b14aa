"""The forms that are timed: a cache and an attention over it, as one compiled program of all steps.

In each layer, a step writes a token of every sequence and attends to it. A layer's output is the next layer's query.
Every layer has its own keys and values, so that the device's caches help a step no more than they would help a model.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.decode.workloads import DecodeWorkload, normal
from kernels import SlabCache, SlotTable, UnifiedCache, decode_attention

Layers = list[tuple[jax.Array, jax.Array]]


@dataclass
class CompiledForm:
    """One form of the cache, filled with the prompts, and its program.

    Attributes:
      layers: keys and values of each layer. A run donates them and returns them updated.
      start: says which slots belong to which sequence before the first step: lengths or a slot table.
      seconds: of one step, one per round.
    """

    name: str
    layers: Layers
    start: Any
    tokens: dict[str, jax.Array]
    program: Callable
    num_steps: int
    seconds: list[float] = field(default_factory=list)

    def time(self) -> float:
        """Runs all steps once; returns the seconds of one step."""
        begin = time.perf_counter()
        self.layers, output = self.program(self.layers, self.start, self.tokens)
        jax.block_until_ready(output)
        return (time.perf_counter() - begin) / self.num_steps


def compile_form(name: str, work: DecodeWorkload, implementation: str | None) -> CompiledForm:
    """Fills a cache of a form and compiles its steps.

    Raises:
      KeyError: an unknown form.
      ValueError: an implementation that can't serve it.
    """
    make, step = FORMS[name]
    rng = np.random.default_rng()
    layers, start = jax.jit(lambda: make(work, rng))()
    tokens = work.tokens(rng)
    one_step = functools.partial(step, work, implementation)
    run = jax.jit(functools.partial(_run, one_step), donate_argnums=0)
    program = run.lower(layers, start, tokens).compile()
    return CompiledForm(name, layers, start, tokens, program, work.num_generated)


def _run(one_step: Callable, layers: Layers, start: Any, tokens: dict[str, jax.Array]):
    def step(carry, new):
        layers, start, output = carry
        layers, start, output = one_step(layers, start, {**new, "query": new["query"] + output})
        return (layers, start, output), None

    nothing = jnp.zeros_like(tokens["query"][0])
    (layers, _, output), _ = jax.lax.scan(step, (layers, start, nothing), tokens)
    return layers, output


def _slabs(work: DecodeWorkload, rng: np.random.Generator):
    shape = (work.num_sequences, work.length, work.num_kv_heads, work.head_dim)
    layers = [(normal(rng, shape, work.dtype), normal(rng, shape, work.dtype)) for _ in range(work.num_layers)]
    return layers, jnp.full(work.num_sequences, work.prompt, jnp.int32)


def _slots(work: DecodeWorkload, rng: np.random.Generator, *, skipping: bool = True):
    block_size = 128
    capacity = work.num_sequences * -(-work.length // block_size) * block_size
    table = SlotTable.empty(work.num_sequences, capacity, block_size=block_size)
    if work.prompt:
        table, _ = table.allocate(work.prompt)
    if not skipping:
        # A summary that excludes no block: each may hold any position of any sequence.
        table = dataclasses.replace(
            table,
            lowest=jnp.zeros_like(table.lowest),
            highest=jnp.full_like(table.highest, work.length),
            some_slot=jnp.full_like(table.some_slot, 0xFFFFFFFF),
            every_slot=jnp.zeros_like(table.every_slot),
        )
    shape = (capacity, work.num_kv_heads, work.head_dim)
    layers = [(normal(rng, shape, work.dtype), normal(rng, shape, work.dtype)) for _ in range(work.num_layers)]
    return layers, table


def _step_slabs(work: DecodeWorkload, implementation: str | None, layers: Layers, lengths, new, attend=None):
    query, written, cache = new["query"], [], None
    for key, value in layers:
        cache = SlabCache(key, value, lengths).write(new["key"], new["value"])
        query = (attend or _decode)(work, implementation, query, cache)
        written.append((cache.key, cache.value))
    assert cache is not None
    return written, cache.lengths, query


def _step_slots(work: DecodeWorkload, implementation: str | None, layers: Layers, table: SlotTable, new, attend=None):
    query, written = new["query"], []
    table, slots = table.allocate(1)
    for key, value in layers:
        cache = UnifiedCache(key, value, table).store(table, slots, new["key"], new["value"])
        query = (attend or _decode)(work, implementation, query, cache)
        written.append((cache.key, cache.value))
    return written, table, query


def _decode(work: DecodeWorkload, implementation: str | None, query, cache):
    return decode_attention(query, cache, work.mask, implementation=implementation)


def _dense(work: DecodeWorkload, implementation: str | None, query, cache):
    """XLA's attention over every slot, under a mask of every slot."""
    slot = jnp.broadcast_to(jnp.arange(cache.capacity, dtype=jnp.int32), (work.num_sequences, cache.capacity))
    position, seen = cache.slots(None, slot)
    allowed = seen & work.mask(cache.lengths[:, None] - 1, position)
    if isinstance(cache, SlabCache):
        return jax.nn.dot_product_attention(
            query, cache.key, cache.value, mask=allowed[:, None, None], implementation="xla"
        )
    # One pass over the slots for all sequences: their tokens are the queries of one long sequence.
    output = jax.nn.dot_product_attention(
        query[:, 0][None], cache.key[None], cache.value[None], mask=allowed[None, None], implementation="xla"
    )
    return output[0][:, None]


FORMS: dict[str, tuple[Callable, Callable]] = {
    "unified": (_slots, _step_slots),
    "unified_no_skipping": (functools.partial(_slots, skipping=False), _step_slots),
    "per_sequence": (_slabs, _step_slabs),
    "xla_unified": (_slots, functools.partial(_step_slots, attend=_dense)),
    "xla_per_sequence": (_slabs, functools.partial(_step_slabs, attend=_dense)),
}
