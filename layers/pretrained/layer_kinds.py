"""Settings that differ between the layers of a pretrained model: windows and rotary embeddings of config.json.

`layer_types` names each layer "full_attention" or "sliding_attention"; older files leave it out, and each family has
its own rule for that case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from kernels import CausalMask, LocalMask, Mask
from layers.config import GPTConfig
from layers.layer_config import LayerOverride
from layers.pretrained.config_keys import Keys
from layers.pretrained.rope_keys import Rope, effective, read_rope, write_scaling
from layers.rope_scaling import RopeScaling
from layers.rotary import attention_factor

FULL, SLIDING = "full_attention", "sliding_attention"


class LayerKind(NamedTuple):
    """One layer: how many tokens it attends to, itself among them (None: all before it), and its rotary embedding."""

    window: int | None
    rope: Rope


@dataclass(frozen=True)
class LayerRule:
    """How a family's config.json describes its layers.

    Args:
      windows: which layers have the config's `sliding_window`: none, all, those of a type, or all unless the file has
        `layer_types`.
      default_window: transformers' window where `sliding_window` is absent; null means none at all.
      switch: the key without which windows are off.
      default_types: the layers' types where `layer_types` is absent.
      default_base: transformers' base where `rope_theta` is absent.
      old_default_base: transformers 4's base there; None: the same.
      rope_by_type: sliding layers have a rotary embedding of their own, without scaling.
      sliding_base_key: where files from before `rope_parameters` have its base; None: where the others have theirs.
      sliding_default_base: transformers' base of sliding layers where that key is absent.
      without_rope: the key that lists layers without a rotary embedding, by 0 and 1.
      partial_rope: True if the rotary embedding may turn a part of the features.
      longrope_alone: longrope is all the scaling that there is, and has Phi-3's ways; see `rope_keys`.
      default_scaling: transformers' scaling where neither `rope_scaling` nor `rope_parameters` is there.
    """

    windows: Literal["none", "all", "by_type", "all_or_by_type"] = "none"
    default_window: int | None = None
    switch: str | None = None
    default_types: Callable[[Keys, int], list[str]] | None = None
    default_base: float = 10_000.0
    old_default_base: float | None = None
    rope_by_type: bool = False
    sliding_base_key: str | None = None
    sliding_default_base: float = 10_000.0
    without_rope: str | None = None
    partial_rope: bool = False
    longrope_alone: bool = False
    default_scaling: Mapping[str, Any] | None = None

    def read(self, keys: Keys) -> list[LayerKind]:
        """Every layer of the model."""
        num_layers = keys.number_of_parts("num_hidden_layers")
        windows = self._read_windows(keys, num_layers)
        if self.rope_by_type:
            full = read_rope(
                keys, layer_type=FULL, default_base=self.default_base, old_default_base=self.old_default_base
            )
            sliding = read_rope(
                keys,
                layer_type=SLIDING,
                base_key=self.sliding_base_key,
                default_base=self.sliding_default_base,
                old_default_base=self.old_default_base,
                scaled=False,
            )
        else:
            full = sliding = read_rope(
                keys,
                default_base=self.default_base,
                default_scaling=self.default_scaling,
                longrope_alone=self.longrope_alone,
            )
        if (full.fraction, sliding.fraction) != (1.0, 1.0) and not self.partial_rope:
            raise ValueError(
                f"{keys.path} has partial_rotary_factor={min(full.fraction, sliding.fraction)}; expected 1, as "
                "transformers turns all features in this family"
            )
        ropes = [full if window is None else sliding for window in windows]
        if self.without_rope is not None:
            turned = has_rope(keys, self.without_rope, num_layers)
            ropes = [rope if one else rope._replace(base=None) for rope, one in zip(ropes, turned, strict=True)]
        return [LayerKind(window, rope) for window, rope in zip(windows, ropes, strict=True)]

    def write(self, kinds: Sequence[LayerKind]) -> dict[str, Any]:
        """The keys for such layers, as far as the family has any: reading them again shows what is lost."""
        windows = [kind.window for kind in kinds]
        widest = max((window for window in windows if window is not None), default=None)
        written: dict[str, Any] = {}
        if self.windows != "none":
            written["sliding_window"] = widest
        if self.windows == "by_type" or (self.windows == "all_or_by_type" and len(set(windows)) > 1):
            written["layer_types"] = [FULL if window is None else SLIDING for window in windows]
            if widest is None and self.switch is None:
                written["sliding_window"] = self.default_window
        if self.switch is not None:
            written[self.switch] = widest is not None
        if self.without_rope is not None:
            written[self.without_rope] = [int(kind.rope.base is not None) for kind in kinds]
        return written | self._write_ropes(kinds)

    def _write_ropes(self, kinds: Sequence[LayerKind]) -> dict[str, Any]:
        turned = [kind for kind in kinds if kind.rope.base is not None]
        full = next((kind.rope for kind in turned if kind.window is None), turned[0].rope if turned else None)
        if full is None:
            return {}
        if self.longrope_alone and full.scaling.kind != "longrope":
            full = full._replace(scaling=RopeScaling())
        written: dict[str, Any] = {"rope_theta": full.base}
        scaling = write_scaling(full.scaling) or {"rope_type": "default"}
        if full.scaling.kind != "none" or self.default_scaling is not None:
            written["rope_scaling"] = scaling
        if full.scaling.kind == "longrope":
            written |= self._write_longrope(full.scaling, scaling)
        if "original_max_position_embeddings" in scaling:
            written["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
        if self.partial_rope:
            written["partial_rotary_factor"] = full.fraction
        parameters: dict[str, Any] = scaling | {"rope_theta": full.base}
        if self.rope_by_type:
            sliding = next((kind.rope for kind in turned if kind.window is not None), full)
            own = write_scaling(sliding.scaling) or {"rope_type": "default"}
            parameters = {FULL: parameters, SLIDING: own | {"rope_theta": sliding.base}}
            if self.sliding_base_key is not None:
                written[self.sliding_base_key] = sliding.base
        elif self.partial_rope:
            parameters["partial_rotary_factor"] = full.fraction
        return written | {"rope_parameters": parameters}

    def _write_longrope(self, scaling: RopeScaling, as_json: dict[str, Any]) -> dict[str, Any]:
        """The keys that transformers 4 needs, too; it takes the ratio of the two lengths for the factor."""
        length = round(scaling.original_context_length * scaling.factor)
        written: dict[str, Any] = {"max_position_embeddings": length}
        is_implied = length / scaling.original_context_length == scaling.factor
        if self.longrope_alone and is_implied and scaling.attention_factor is None:
            tables = {name: as_json[name] for name in ("short_factor", "long_factor")}
            written["rope_scaling"] = {"type": "longrope"} | tables
        elif not is_implied and scaling.attention_factor is None:
            as_json["attention_factor"] = attention_factor(scaling)
        return written

    def _read_windows(self, keys: Keys, num_layers: int) -> list[int | None]:
        if self.windows == "none" or (self.switch is not None and not keys.flag(self.switch, False)):
            if self.windows == "by_type" and "layer_types" in keys:
                keys.choices("layer_types", (FULL,), num_layers)
            return [None] * num_layers
        window = self.default_window if "sliding_window" not in keys.values else None
        if "sliding_window" in keys:
            window = keys.integer("sliding_window")
        if "layer_types" in keys and self.windows != "all":
            types = keys.choices("layer_types", (FULL, SLIDING), num_layers)
        elif self.default_types is None or (window is None and self.switch is not None):
            return [window] * num_layers
        else:
            types = self.default_types(keys, num_layers)
        if SLIDING in types and window is None:
            raise keys.wrong("sliding_window", "an integer, as some layers are of the type sliding_attention")
        return [window if kind == SLIDING else None for kind in types]


def has_rope(keys: Keys, name: str, num_layers: int) -> list[int]:
    """1 for each layer that has a rotary embedding and 0 for each that has none, as the key of this name lists them."""
    if name in keys:
        return keys.choices(name, (0, 1), num_layers)
    interval = keys.integer("no_rope_layer_interval", 4)
    return [int((layer + 1) % interval != 0) for layer in range(num_layers)]


def settings_of(kinds: Sequence[LayerKind]) -> dict[str, Any]:
    """The fields of a GPTConfig for such layers: the shortest pattern that repeats, and what most layers share."""
    period = next(p for p in range(1, len(kinds) + 1) if all(a == b for a, b in zip(kinds, kinds[p:], strict=False)))
    kinds = kinds[:period]
    turned = [kind for kind in kinds if kind.rope.base is not None]
    shared = next((kind.rope for kind in turned if kind.window is None), (turned or kinds)[0].rope)
    masks = tuple(mask_of(kind.window) for kind in kinds)
    overrides = tuple(_override(kind.rope, shared) for kind in kinds)
    return {
        "masks": masks[:1] if len(set(masks)) == 1 else masks,
        "layer_overrides": () if set(overrides) == {LayerOverride()} else overrides,
        "rope_base": shared.base,
        "rope_scaling": shared.scaling,
        "rope_fraction": shared.fraction,
    }


def kinds_of(config: GPTConfig) -> list[LayerKind]:
    """Every layer of a GPT.

    Raises:
      ValueError: a layer is of a kind that no family here has.
    """
    kinds = []
    for index in range(config.num_layers):
        layer = config.layer(index)
        if (layer.num_kv_heads, layer.head_dim) != (config.num_kv_heads, config.head_dim):
            raise ValueError(f"no num_kv_heads and head_dim in model.layer_overrides (here in layer {index})")
        if layer.rope_scaling.kind == "ntk":
            raise ValueError("no model.rope_scaling.kind=ntk")
        rope = Rope(layer.rope_base, effective(layer.rope_scaling), layer.rope_fraction)
        kinds.append(LayerKind(_window_of(layer.mask), rope))
    return kinds


def mask_of(window: int | None) -> Mask:
    """The causal mask of a window; None: of no window."""
    return CausalMask() if window is None else CausalMask() & LocalMask(window - 1, 0)


def _window_of(mask: Mask) -> int | None:
    match mask.window:
        case None, 0:
            return None
        case int(left), 0 if left >= 0:
            return left + 1
    raise ValueError(f"CausalMask() or CausalMask() & LocalMask(…, 0) in model.masks (here {mask!r})")


def _override(rope: Rope, shared: Rope) -> LayerOverride:
    if rope.base is None:
        return LayerOverride(rope_base=None)
    names = ("rope_base", "rope_scaling", "rope_fraction")
    own: dict[str, Any] = {
        name: value for name, value, model in zip(names, rope, shared, strict=True) if value != model
    }
    return LayerOverride(**own)
