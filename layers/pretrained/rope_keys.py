"""Rotary embedding as config.json writes it: `rope_parameters`, and before transformers 5 `rope_theta`, `rope_scaling`.

Source: transformers' modeling_rope_utils.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from layers.pretrained.config_keys import Keys
from layers.rope_scaling import RopeScaling, RopeScalingKind
from layers.rotary import attention_factor

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
            "original_max_position_embeddings": "original_context_length",
            "factor": "factor",
            "short_factor": "short_factors",
            "long_factor": "long_factors",
            "attention_factor": "attention_factor",
        },
    ),
}
_ORIGINAL_LENGTH = "original_max_position_embeddings"
_PHI3_NAMES = {"su": "longrope", "yarn": "longrope"}
_PHI3_ORIGINAL_LENGTH = 4096
# Keys without which transformers doesn't compute a kind; the other ones have defaults.
_REQUIRED = ("low_freq_factor", "high_freq_factor")


class Rope(NamedTuple):
    """The rotary embedding of a layer. `base` is None if it has none."""

    base: float | None
    scaling: RopeScaling
    fraction: float


def read_rope(
    keys: Keys,
    *,
    layer_type: str | None = None,
    base_key: str | None = "rope_theta",
    default_base: float,
    old_default_base: float | None = None,
    scaled: bool = True,
    default_scaling: Mapping[str, Any] | None = None,
    longrope_alone: bool = False,
) -> Rope:
    """Reads the rotary embedding of all layers, or of those of one type.

    The result is that of transformers 5. Unless the file has `rope_parameters` alone, transformers 4 must give the
    same.

    Args:
      keys: of config.json.
      layer_type: the key of these layers within `rope_parameters`; None: it isn't nested.
      base_key: where the base is, in files from before `rope_parameters`; None: transformers 5 finds none there for
        these layers, and transformers 4 that of the other ones.
      default_base: transformers' base where the file has none.
      old_default_base: transformers 4's base there; None: the same.
      scaled: applies the `rope_scaling` of such files to these layers.
      default_scaling: transformers' scaling where the file has neither `rope_scaling` nor `rope_parameters`.
      longrope_alone: as Phi-3 does, whose files have longrope or nothing, also under the names su and yarn, and
        `original_max_position_embeddings` always, if by default.

    Raises:
      ValueError: it is of a kind that isn't known here, its numbers make no sense, or transformers 4 and 5 differ.
    """
    inner = keys.inner("rope_parameters")
    if inner is not None and layer_type is not None:
        inner = inner.inner(layer_type)
    elif inner is not None and not inner.values.keys().isdisjoint(("full_attention", "sliding_attention")):
        raise keys.wrong("rope_parameters", "one object for all layers, as this family's layers share it")
    old_base_key, old = base_key or "rope_theta", keys.inner("rope_scaling")
    is_scaled = old is not None and bool(old.values)
    is_old = is_scaled or old_base_key in keys.values or "rope_parameters" not in keys
    if scaled and old is not None and is_scaled:
        # Where a file has both, transformers 5 uses the old keys instead of the others, or merges them over a layer
        # type's keys.
        under = {} if layer_type is None else {"rope_type": "default"} if inner is None else inner.values
        inner = Keys({**under, **old.values}, old.path)
    elif inner is None and default_scaling is not None:
        if "rope_scaling" in keys.values and old is None:
            raise keys.wrong("rope_scaling", "an object: transformers 4 scales nothing here, and transformers 5 does")
        inner, is_old = Keys(default_scaling, keys.path), True
    if inner is None:
        inner = Keys({}, keys.path)
    base = inner.number("rope_theta", default_base if base_key is None else keys.number(base_key, default_base))
    old_base = keys.number(old_base_key, old_default_base or default_base)
    if is_old and base != old_base:
        raise _differs(keys, old_base_key, old_base, base)
    old_fraction = keys.number("partial_rotary_factor", 1.0) if "partial_rotary_factor" in keys else 1.0
    fraction = inner.number("partial_rotary_factor", old_fraction)
    if is_old and fraction != old_fraction:
        raise _differs(keys, "partial_rotary_factor", old_fraction, fraction)
    scaling = _read_scaling(inner, keys, is_old, is_nested=layer_type is not None, longrope_alone=longrope_alone)
    return Rope(base, scaling, fraction)


def _differs(keys: Keys, name: str, old: float, new: float) -> ValueError:
    return ValueError(
        f"{keys.path} gives {name} as {old!r} to transformers 4 and as {new!r} to transformers 5; "
        "edit it so that both take the same"
    )


def write_scaling(scaling: RopeScaling) -> dict[str, Any] | None:
    """The scaling as config.json has it; None if transformers has none of the kind."""
    for rope_type, (kind, names) in _KINDS.items():
        if kind == scaling.kind:
            values = {theirs: getattr(scaling, ours) for theirs, ours in names.items()}
            as_json = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
            return {"rope_type": rope_type} | {name: value for name, value in as_json.items() if value is not None}
    return None


def effective(scaling: RopeScaling) -> RopeScaling:
    """A scaling of transformers' kinds, with default values in the fields that its kind ignores."""
    names = next(names for kind, names in _KINDS.values() if kind == scaling.kind)
    found = RopeScaling(kind=scaling.kind, **{name: getattr(scaling, name) for name in names.values()})
    by_default = dataclasses.replace(found, attention_factor=None)
    return by_default if attention_factor(by_default) == attention_factor(found) else found


def _read_scaling(inner: Keys, keys: Keys, is_old: bool, *, is_nested: bool, longrope_alone: bool) -> RopeScaling:
    names_of_type = [inner.values[name] for name in ("rope_type", "type") if name in inner.values]
    rope_type = names_of_type[0] if names_of_type else "default"
    if any(name != rope_type for name in names_of_type):
        raise inner.wrong("type", f"rope_type={rope_type!r:.200} as well, as one version of transformers reads either")
    if longrope_alone and isinstance(rope_type, str):
        rope_type = _PHI3_NAMES.get(rope_type, rope_type)
    known = ("default", "longrope") if longrope_alone else tuple(_KINDS)
    if rope_type not in known:
        raise ValueError(
            f"{inner.path} has rope_type={rope_type!r:.200}; expected one of {', '.join(known)}"
            + (" ('dynamic' changes a text's keys while it grows)" if rope_type == "dynamic" else "")
        )
    kind, names = _KINDS[rope_type]
    found: dict[str, Any] = {"kind": kind}
    for theirs, ours in names.items():
        if theirs == _ORIGINAL_LENGTH:
            found[ours] = _original_length(inner, keys, kind, is_old, is_nested, longrope_alone)
        elif theirs == "factor" and kind == "longrope":
            found[ours] = _longrope_factor(inner, keys, found["original_context_length"], is_old, longrope_alone)
        elif theirs in ("short_factor", "long_factor"):
            found[ours] = inner.numbers(theirs)
        elif theirs == "truncate" and theirs in inner.values:
            found[ours] = inner.flag(theirs)
        elif theirs in inner or theirs in ("factor", *_REQUIRED):
            found[ours] = inner.number(theirs)
    if kind == "yarn" and "attention_factor" not in found:
        scales = [inner.number(name) for name in ("mscale", "mscale_all_dim") if name in inner]
        if len(scales) == 2 and all(scales):
            found["attention_factor"] = _mscale(found["factor"], scales[0]) / _mscale(found["factor"], scales[1])
    if is_nested and not found.get("truncate", True):
        raise inner.wrong("truncate", "true, as transformers 5 doesn't look at it here")
    try:
        return effective(RopeScaling(**found))
    except ValueError as error:
        raise ValueError(f"{inner.path} can't be used: {error!s:.300}") from None


def _original_length(
    inner: Keys, keys: Keys, kind: RopeScalingKind, is_old: bool, is_nested: bool, longrope_alone: bool
) -> int:
    own = inner.integer(_ORIGINAL_LENGTH) if _ORIGINAL_LENGTH in inner else None
    is_beside = longrope_alone or _ORIGINAL_LENGTH in keys.values
    beside = keys.integer(_ORIGINAL_LENGTH, _PHI3_ORIGINAL_LENGTH) if is_beside else None

    def or_longest(length: int | None) -> int:
        return keys.integer("max_position_embeddings") if length is None else length

    new = or_longest(own if is_nested or beside is None else beside)
    if is_old and (old := or_longest(beside if kind == "longrope" else own)) != new:
        raise _differs(keys, _ORIGINAL_LENGTH, old, new)
    return new


def _longrope_factor(inner: Keys, keys: Keys, original_length: int, is_old: bool, longrope_alone: bool) -> float:
    if "factor" not in inner:
        return keys.integer("max_position_embeddings") / original_length
    factor = inner.number("factor")
    # Nothing but the attention factor depends on it.
    if is_old and (longrope_alone or _ORIGINAL_LENGTH in keys.values) and "attention_factor" not in inner:
        old = keys.integer("max_position_embeddings") / original_length
        if old != factor:
            raise _differs(keys, "longrope's factor", old, factor)
    return factor


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
