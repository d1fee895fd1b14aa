"""Rotary embedding as config.json writes it: `rope_parameters`, and before transformers 5 `rope_theta`, `rope_scaling`.

Source: transformers' modeling_rope_utils.py.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from layers.pretrained.config_keys import Keys
from layers.rope_scaling import RopeScaling, RopeScalingKind

# transformers' rope_type, our kind, and the keys of the file against the fields of a RopeScaling.
_KINDS: dict[str, tuple[RopeScalingKind, dict[str, str]]] = {
    "default": ("none", {}),
    "linear": ("linear", {"factor": "factor"}),
    "llama3": (
        "llama3",
        {
            "factor": "factor",
            "low_freq_factor": "low_frequency_factor",
            "high_freq_factor": "high_frequency_factor",
            "original_max_position_embeddings": "original_context_length",
        },
    ),
    "yarn": (
        "yarn",
        {
            "factor": "factor",
            "original_max_position_embeddings": "original_context_length",
            "beta_fast": "beta_fast",
            "beta_slow": "beta_slow",
            "truncate": "truncate",
            "attention_factor": "attention_factor",
        },
    ),
    "longrope": (
        "longrope",
        {
            "factor": "factor",
            "original_max_position_embeddings": "original_context_length",
            "short_factor": "short_factors",
            "long_factor": "long_factors",
            "attention_factor": "attention_factor",
        },
    ),
}
_OLD_NAMES = {"su": "longrope"}
UNSCALED = RopeScaling()


class Rope(NamedTuple):
    """The rotary embedding of a layer. `base` is None if it has none."""

    base: float | None
    scaling: RopeScaling
    fraction: float


def read_rope(
    keys: Keys,
    *,
    layer_type: str | None = None,
    base_key: str = "rope_theta",
    default_base: float,
    scaled: bool = True,
    default_scaling: RopeScaling = UNSCALED,
) -> Rope:
    """Reads the rotary embedding of all layers, or of those of one type.

    Args:
      keys: of config.json.
      layer_type: what `rope_parameters` is nested by; None: it isn't.
      base_key: where the base is, in files from before `rope_parameters`.
      default_base: what transformers takes where it is nowhere.
      scaled: whether the `rope_scaling` of such files is for these layers.
      default_scaling: what transformers takes where the file has neither `rope_scaling` nor `rope_parameters`.

    Raises:
      ValueError: it is of a kind that isn't known here, or its numbers make no sense.
    """
    inner = keys.inner("rope_parameters")
    if inner is not None and layer_type is not None:
        inner = inner.inner(layer_type)
    base = keys.number(base_key, default_base)
    old = keys.inner("rope_scaling")
    if scaled and old is not None and old.values:
        # Where a file has both, transformers 5 has the old keys in the others' place, or beside a layer type's others.
        beside = inner.values if inner is not None and layer_type is not None else {}
        inner = Keys({**beside, **old.values}, old.place)
    if inner is None:
        inner = Keys({}, keys.place)
    fraction = inner.number("partial_rotary_factor", keys.number("partial_rotary_factor", 1.0))
    has_scaling = not keys.values.keys().isdisjoint(("rope_parameters", "rope_scaling"))  # null: none
    scaling = _read_scaling(inner, keys) if has_scaling else default_scaling
    return Rope(inner.number("rope_theta", base), scaling, fraction)


def write_scaling(scaling: RopeScaling) -> dict[str, Any] | None:
    """The scaling as config.json has it; None if transformers has none of the kind."""
    for rope_type, (kind, names) in _KINDS.items():
        if kind == scaling.kind:
            values = {theirs: getattr(scaling, ours) for theirs, ours in names.items()}
            as_json = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
            return {"rope_type": rope_type} | {name: value for name, value in as_json.items() if value is not None}
    return None


def effective(scaling: RopeScaling) -> RopeScaling:
    """The same scaling, one of transformers' kinds, with default values where that kind doesn't look."""
    names = next(names for kind, names in _KINDS.values() if kind == scaling.kind)
    return RopeScaling(kind=scaling.kind, **{name: getattr(scaling, name) for name in names.values()})


def _read_scaling(inner: Keys, keys: Keys) -> RopeScaling:
    rope_type = inner.values.get("rope_type", inner.values.get("type", "default"))
    rope_type = _OLD_NAMES.get(rope_type, rope_type) if isinstance(rope_type, str) else rope_type
    if not isinstance(rope_type, str) or rope_type not in _KINDS:
        raise ValueError(
            f"{inner.place} has rope_type={rope_type!r:.200}; expected one of {', '.join(_KINDS)}"
            + (" ('dynamic' changes a text's keys while it grows)" if rope_type == "dynamic" else "")
        )
    kind, names = _KINDS[rope_type]
    found: dict[str, Any] = {"kind": kind}
    for theirs, ours in names.items():
        if theirs == "original_max_position_embeddings":
            found[ours] = _original_length(inner, keys)
        elif theirs == "factor" and theirs not in inner:
            found[ours] = keys.integer("max_position_embeddings") / _original_length(inner, keys)
        elif theirs in ("short_factor", "long_factor"):
            found[ours] = inner.numbers(theirs)
        elif theirs in inner:
            found[ours] = inner.flag(theirs) if theirs == "truncate" else inner.number(theirs)
    if kind == "yarn" and "attention_factor" not in found:
        scales = [inner.number(name) for name in ("mscale", "mscale_all_dim") if name in inner]
        if len(scales) == 2 and all(scales):
            found["attention_factor"] = _mscale(found["factor"], scales[0]) / _mscale(found["factor"], scales[1])
    try:
        return RopeScaling(**found)
    except ValueError as error:
        raise ValueError(f"{inner.place} can't be used: {error!s:.300}") from None


def _original_length(inner: Keys, keys: Keys) -> int:
    # Phi-3 has it beside the other keys, where transformers looks first.
    name = "original_max_position_embeddings"
    source = next((source for source in (keys, inner) if name in source), None)
    return keys.integer("max_position_embeddings") if source is None else source.integer(name)


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
