"""CPU devices in the place of GPUs that read each other's memory: JAX's collectives do what the kernels do."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from kernels import backends
from kernels.collectives import chunks, peer_memory


def pass_for_gpus(monkeypatch, longest_tile):
    """Lets a few CPU devices pass for such GPUs.

    And `blockwise`, whose tiles have up to `longest_tile` keys, for a backend that may be given less than whole rows of
    keys: it visits the plan's tiles alone.
    """
    with_tiles = tuple(
        dataclasses.replace(backend, longest_tile=longest_tile) if backend.name == "blockwise" else backend
        for backend in backends.BACKENDS
    )
    monkeypatch.setitem(backends.TABLES, "attention", with_tiles)
    monkeypatch.setattr(peer_memory, "unsupported_reason", lambda mesh, axis: None)
    monkeypatch.setattr(peer_memory, "sizes_unsupported_reason", lambda sizes, axis: None)
    monkeypatch.setattr(chunks, "unsupported_reason", lambda *_: None)
    monkeypatch.setattr(chunks, "gather_chunks", gather_chunks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def gather_chunks(arrays, tables, axis, _):
    """`kernels.collectives.chunks.gather_chunks`, by JAX."""

    def put_together(x):
        rows = pick(jnp.concatenate(list(by_distance(x, axis)), axis=1), tables.of_row)
        return jnp.where(is_there(x, rows, tables), rows, jnp.nan)  # the kernels leave what the memory held

    return tuple(map(put_together, arrays))


def gather_chunks_backward(axis, _, tables, gradients):
    def sum_up(x):
        # Past the places that are put together, kernels write no gradients.
        x = jnp.where(is_there(x, x, tables), x, jnp.nan)
        own, *others = jnp.moveaxis(tables.of_own, -1, 0)
        total = pick(x, own)
        for theirs, place in zip(by_distance(x, axis)[1:], others, strict=True):
            needed = (place > 0).reshape(*place.shape, *[1] * (x.ndim - 2))
            total += jnp.where(needed, pick(theirs, jnp.maximum(place - 1, 0)), 0)
        return total

    return tuple(map(sum_up, gradients)), None


gather_chunks.defvjp(
    lambda arrays, tables, *rest: (gather_chunks(arrays, tables, *rest), tables), gather_chunks_backward
)


def by_distance(x, axis):
    """Every rank's, this rank's first, then the next one's."""
    return jnp.roll(lax.all_gather(x, axis), -lax.axis_index(axis), axis=0)


def pick(x, numbers):
    return jax.vmap(lambda row, numbers: row[numbers])(x, numbers)


def is_there(x, rows, tables):
    return (jnp.arange(rows.shape[1]) < tables.num_chunks).reshape(-1, *[1] * (x.ndim - 2))
