"""Each backend's error against attention in float64, on the same fresh random inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.attention.cases import Case, Problem, describe, make_problem
from experiments.benchmarks.attention.contenders import compile_contender
from experiments.benchmarks.attention.measure import reason, where
from experiments.benchmarks.attention.torch_peers import TORCH_PEERS
from kernels import dot_product_attention
from kernels.backends.tuning import Tuning

_MOST_QUERIES = 1024


class Error(NamedTuple):
    """How far an array is from the truth.

    Attributes:
      rms: of the difference, relative to the truth's.
      largest: element of the difference, in absolute value, relative to the truth's largest.
    """

    rms: float
    largest: float


def measure_errors(
    name: str, case: Case, backends: Sequence[str], *, baseline: str, length: int | None
) -> list[dict[str, Any]]:
    """Errors of one case, cut to a length if one is given, one row per backend.

    A ratio is a backend's rms error over the baseline's. A backend without a backward has its output's error alone, and
    the reason.
    """
    problem = make_problem(case, None if length is None else min(length, case.length))
    expected = truth(problem)
    rows = []
    found: dict[str, dict[str, Error]] = {}
    for backend in backends:
        row = {"case": name, **describe(case), "length": problem.length, **where(), "backend": backend}
        found[backend], refusal = errors_of(problem, backend, expected)
        errors = {quantity: error._asdict() for quantity, error in found[backend].items()}
        rows.append({**row, "errors": errors} | ({} if refusal is None else {"refused": refusal}))
    for row in rows:
        theirs = found.get(baseline, {})
        ratios = {q: error.rms / theirs[q].rms for q, error in found[row["backend"]].items() if q in theirs}
        row |= {"baseline": baseline, "error_ratios": ratios}
    return rows


def quantities(case: Case) -> tuple[str, ...]:
    """Names of the compared arrays: the output and the gradients."""
    return ("output", *(f"d_{name}" for name in case.inputs))


def truth(problem: Problem) -> dict[str, np.ndarray]:
    """Output and gradients in float64, dense, some queries of one head at a time.

    The weights that there are at a time take 8 KB for each of the batch's tokens, and a few such arrays are needed.
    """
    case, ids = problem.case, problem.segment_ids
    if problem.bounds is not None:
        raise ValueError(f"errors are measured without bounds, not with {case.bounds!r}; leave the case out")
    # All parts have as many queries, so that one program computes them all.
    num_queries = math.gcd(problem.length, _MOST_QUERIES)

    def in_parts(x, axis: int):
        """[..., L, ...] → [parts, ..., queries, ...]."""
        parts = x.reshape(*x.shape[:axis], -1, num_queries, *x.shape[axis + 1 :])
        return jnp.moveaxis(parts, axis, 0)

    def whole(parts):
        """[parts, B, queries, 1, H] → [B, L, 1, H]."""
        return jnp.moveaxis(parts, 0, 1).reshape(case.batch, problem.length, 1, -1)

    with jax.enable_x64(True):  # type: ignore[attr-defined]  # JAX's stubs lack it
        positions, kv_positions = (
            jnp.arange(num, dtype=jnp.int32) for num in (problem.length, case.num_keys(problem.length))
        )

        def one_head(arrays):
            shared = {name: arrays[name] for name in case.inputs if name != "query"}

            def some_queries(shared_gradients, part):
                query, d_output, query_positions, query_ids = part

                def attend(query, shared):
                    return dot_product_attention(
                        query,
                        **shared,
                        mask=case.mask,
                        query_segment_ids=query_ids,
                        key_value_segment_ids=ids,
                        query_positions=query_positions,
                        key_value_positions=kv_positions,
                        implementation="reference",
                    )

                output, vjp = jax.vjp(attend, query, shared)
                d_query, added = vjp(d_output)
                return jax.tree.map(jnp.add, shared_gradients, added), (output, d_query)

            parts = (
                in_parts(arrays["query"], 1),
                in_parts(arrays["d_output"], 1),
                in_parts(positions, 0),
                None if ids is None else in_parts(ids, 1),
            )
            shared_gradients, query_gradients = jax.lax.scan(some_queries, jax.tree.map(jnp.zeros_like, shared), parts)
            output, d_query = map(whole, query_gradients)
            return {"output": output, "d_query": d_query} | {f"d_{name}": x for name, x in shared_gradients.items()}

        def by_query_head(x):
            """[B, L, heads, H] → [query heads, B, L, 1, H]; sinks [query heads] → [query heads, 1]."""
            x = x.astype("float64")
            if x.ndim == 1:
                return x[:, None]
            return jnp.moveaxis(jnp.repeat(x, case.num_heads // x.shape[2], axis=2), 2, 0)[:, :, :, None]

        def summed(name: str, x):
            """[query heads, B, L, 1, H] → [B, L, heads, H]; of sinks, [query heads, 1] → [query heads]."""
            if x.ndim == 2:
                return x[:, 0]
            num_heads = case.num_kv_heads if name in ("d_key", "d_value") else case.num_heads
            return jnp.moveaxis(x.reshape(num_heads, -1, *x.shape[1:3], x.shape[4]).sum(1), 0, 2)

        @jax.jit
        def all_heads(arrays):
            results = jax.lax.map(one_head, {name: by_query_head(x) for name, x in arrays.items()})
            return {name: summed(name, x) for name, x in results.items()}

        results = all_heads(problem.arrays)
        return {name: np.asarray(results[name]) for name in quantities(case)}


def errors_of(
    problem: Problem, backend: str | Tuning, expected: dict[str, np.ndarray]
) -> tuple[dict[str, Error], str | None]:
    """Errors of what a backend computes, and why some are missing, or None."""
    if isinstance(backend, str) and backend in TORCH_PEERS:
        return {}, "draws inputs of its own, so it isn't checked"
    errors: dict[str, Error] = {}
    try:
        errors["output"] = error(compile_contender(problem, backend, "forward").start(), expected["output"])
        _, gradients = compile_contender(problem, backend, "forward_backward").start()
    except Exception as refusal:  # other systems raise anything, and one that fails must not end the others
        return errors, reason(refusal)
    _, *names = quantities(problem.case)
    return errors | {name: error(x, expected[name]) for name, x in zip(names, gradients, strict=True)}, None


def error(computed: jax.Array, expected: np.ndarray) -> Error:
    """How far an array is from the truth."""
    difference = np.asarray(computed, np.float64) - expected
    rms, largest = np.linalg.norm(difference) / np.linalg.norm(expected), abs(difference).max() / abs(expected).max()
    return Error(float(rms), float(largest))
