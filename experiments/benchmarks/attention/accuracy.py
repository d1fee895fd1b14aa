"""Each backend's error against attention in float64, on the same fresh random inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.benchmarks.attention.cases import Case, Problem, describe, make_problem
from experiments.benchmarks.attention.contenders import compile_contender
from experiments.benchmarks.attention.measure import reason, where
from experiments.benchmarks.attention.torch_peers import TORCH_PEERS
from kernels import dot_product_attention
from kernels.tuning import Tuning

GRADIENTS = ("d_query", "d_key", "d_value")
QUANTITIES = ("output", *GRADIENTS)


class Error(NamedTuple):
    """How far an array is from the truth.

    Attributes:
      rms: of the difference, relative to the truth's.
      largest: element of the difference, in absolute value, relative to the truth's largest.
    """

    rms: float
    largest: float


def measure_errors(
    name: str, case: Case, backends: Sequence[str], *, baseline: str, length: int
) -> list[dict[str, Any]]:
    """Errors of one case, cut to a length at which the truth can be had, one row per backend.

    A ratio is a backend's rms error over the baseline's. A backend without a backward has its output's error alone, and
    the reason.
    """
    problem = make_problem(case, min(length, case.length))
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


def truth(problem: Problem) -> dict[str, np.ndarray]:
    """Output and gradients in float64, dense, a key/value head and its query heads at a time."""
    case = problem.case
    with jax.enable_x64(True):  # type: ignore[attr-defined]  # JAX's stubs lack it

        def one_head(arrays):
            def attend(query, key, value):
                ids = problem.segment_ids
                return dot_product_attention(
                    query,
                    key,
                    value,
                    case.mask,
                    query_segment_ids=ids,
                    key_value_segment_ids=ids,
                    implementation="reference",
                )

            output, vjp = jax.vjp(attend, arrays["query"], arrays["key"], arrays["value"])
            return output, *vjp(arrays["d_output"])

        def split(x):
            """[B, L, heads, H] → [key/value heads, B, L, heads of one, H]."""
            grouped = x.astype("float64").reshape(*x.shape[:2], case.num_kv_heads, -1, x.shape[-1])
            return grouped.transpose(2, 0, 1, 3, 4)

        @jax.jit
        def all_heads(arrays):
            results = jax.lax.map(one_head, {name: split(x) for name, x in arrays.items()})
            return [x.transpose(1, 2, 0, 3, 4).reshape(*x.shape[1:3], -1, x.shape[-1]) for x in results]

        return dict(zip(QUANTITIES, map(np.asarray, all_heads(problem.arrays)), strict=True))


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
    return errors | {name: error(x, expected[name]) for name, x in zip(GRADIENTS, gradients, strict=True)}, None


def error(computed: jax.Array, expected: np.ndarray) -> Error:
    """How far an array is from the truth."""
    difference = np.asarray(computed, np.float64) - expected
    rms, largest = np.linalg.norm(difference) / np.linalg.norm(expected), abs(difference).max() / abs(expected).max()
    return Error(float(rms), float(largest))
