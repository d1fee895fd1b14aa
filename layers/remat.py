"""Remat policies: which activations the backward pass finds on the device, which on the host, and which it recomputes.

A policy goes by the names that the layers give to activations (`jax.ad_checkpoint.checkpoint_name`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

ACTIVATIONS = {
    "layer_input": "the residual stream that enters a block",
    "attention_output": "the output of the attention kernel",
    "attention_lse": "the kernel's log-sum-exp of each query, which its backward needs beside the output",
    "projection": "the outputs of a block's matmuls",
}
"""The names that there are. Activations without a name are recomputed."""


@dataclass(frozen=True)
class Remat:
    """Where a block's named activations stay between the forward and the backward pass; the others are recomputed.

    A block's input isn't recomputed, whatever the policy: it stays on the device unless it is offloaded.

    Args:
      save: names of those that stay on the device.
      offload: names of those that go to the host's pinned memory.

    Raises:
      ValueError: an unknown name, or one that stands twice.

    >>> Remat(save=("attention_lse",), offload=("layer_input", "attention_output"))
    Remat(save=('attention_lse',), offload=('layer_input', 'attention_output'))
    >>> Remat(offload=("layer_inputs",))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: no activation is named 'layer_inputs'; expected layer_input, ...; did you mean layer_input?
    """

    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()

    def __post_init__(self):
        names = (*self.save, *self.offload)
        for name in names:
            if name not in ACTIVATIONS:
                raise ValueError(
                    f"no activation is named {name!r}; expected {', '.join(ACTIVATIONS)}{_nearest(name, ACTIVATIONS)}"
                )
            if names.count(name) > 1:
                raise ValueError(f"{name} stands twice; save it, or offload it")

    def keeping_attention(self) -> Remat:
        """The policy without recomputing attention: its activations stay on the device unless they are offloaded.

        For attention over a mesh, which would exchange keys again.
        """
        kept = tuple(name for name in ("attention_output", "attention_lse") if name not in (*self.save, *self.offload))
        return replace(self, save=(*self.save, *kept))

    def apply(self, function: Callable[..., Any], *, prevent_cse: bool) -> Callable[..., Any]:
        """`jax.checkpoint` of a function under this policy.

        Args:
          function: takes a static argument first.
          prevent_cse: adds a barrier that keeps XLA from merging the recomputation with the forward pass; in a loop
            none is needed.
        """
        if self.offload:
            policy = jax.checkpoint_policies.save_and_offload_only_these_names(
                names_which_can_be_saved=self.save,
                names_which_can_be_offloaded=self.offload,
                offload_src="device",
                offload_dst=HOST_MEMORY,
            )
        else:
            policy = jax.checkpoint_policies.save_only_these_names(*self.save)
        return jax.checkpoint(function, policy=policy, prevent_cse=prevent_cse, static_argnums=(0,))


HOST_MEMORY = "pinned_host"
"""JAX's name of the host memory that a device copies from and to by itself."""

REMAT_POLICIES: dict[str, Remat | None] = {
    "none": None,
    "save_matmuls": Remat(save=("attention_output", "attention_lse", "projection")),
    "save_attention": Remat(save=("attention_output", "attention_lse")),
    "full": Remat(),
    "offload_attention": Remat(offload=("layer_input", "attention_output", "attention_lse")),
    "offload_inputs": Remat(offload=("layer_input",)),
}
"""The policies that have a name of their own, from the most device memory to the least. None: nothing is recomputed."""

_FORM = "save(NAME, …) & offload(NAME, …)"


def parse_remat(text: str) -> Remat | None:
    """Reads a policy by its name, or one that is spelled out.

    Args:
      text: a key of `REMAT_POLICIES`, or `save(…)`, `offload(…)` or both, joined by `&`, of names of activations.

    Returns:
      None for "none": nothing is recomputed.

    Raises:
      ValueError: it is neither.

    >>> parse_remat("full")
    Remat(save=(), offload=())
    >>> parse_remat("save(attention_output, attention_lse) & offload(layer_input)")
    Remat(save=('attention_output', 'attention_lse'), offload=('layer_input',))
    >>> parse_remat("fulll")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: 'fulll' is not one of none, ..., nor of the form save(NAME, …) & offload(NAME, …); did you mean full?
    """
    if text in REMAT_POLICIES:
        return REMAT_POLICIES[text]
    kept: dict[str, tuple[str, ...]] = {}
    for part in text.split("&"):
        spelled = re.fullmatch(r"\s*(save|offload)\s*\(([^()]*)\)\s*", part)
        if spelled is None or spelled[1] in kept:
            raise ValueError(
                f"{text!r} is not one of {', '.join(REMAT_POLICIES)}, nor of the form {_FORM}"
                + _nearest(text, REMAT_POLICIES)
            )
        kept[spelled[1]] = tuple(name for name in re.split(r"[\s,]+", spelled[2]) if name)
    return Remat(**kept)


def offloads(text: str) -> bool:
    """True if a policy, in `parse_remat`'s form, offloads anything to the host."""
    policy = parse_remat(text)
    return policy is not None and bool(policy.offload)


def _nearest(name: str, known: Sequence[str] | dict[Any, Any]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
