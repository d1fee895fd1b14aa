"""A family of pretrained models: one literal table of its settings and one of its tensors, read in both directions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from layers.config import GPTConfig, MoEConfig
from layers.pretrained.config_keys import Key, Keys
from layers.pretrained.layer_kinds import LayerRule, kinds_of, settings_of
from layers.pretrained.safetensors_file import Tensor
from layers.pretrained.steps import TensorRow

# What a config says about how a model runs or is trained, and not about what it computes.
_RUN_FIELDS = frozenset(
    ("implementation", "decode_implementation", "remat", "scan_layers", "compute_dtype", "param_dtype")
)
_TRAINING_FIELDS = frozenset(("load_balance_loss_weight", "router_z_loss_weight"))
# These are compared layer by layer.
_LAYER_FIELDS = frozenset(("masks", "layer_overrides", "rope_base", "rope_scaling", "rope_fraction"))


@dataclass(frozen=True)
class Family:
    """What transformers calls a model type.

    Args:
      model_type: as config.json names it.
      architecture: transformers' class of the language model.
      keys: settings that differ between models of the family.
      fixed: settings of ours that are the same in all of them.
      required: keys that may have these values alone; an absent key has the first.
      rule: how config.json describes the layers.
      rows: tensors; those whose parameters a model doesn't have are left out.
      unused: beginnings and ends of the names of tensors that transformers doesn't use either.
      derived: settings of ours that follow from others.
      adapt: makes of a folder's tensors those that `rows` names, such as bfloat16 of packed blocks.
      section: the key under which a file of several models has this one's config; None: it is the whole file.
    """

    model_type: str
    architecture: str
    keys: tuple[Key, ...]
    rule: LayerRule
    rows: tuple[TensorRow, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    required: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    derived: Mapping[str, Callable[[Mapping[str, Any]], Any]] = field(default_factory=dict)
    adapt: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None
    section: str | None = None

    def read_config(self, values: Mapping[str, Any], place: str) -> GPTConfig:
        """The config of a model.

        Args:
          values: a config.json's.
          place: its path, for error messages.

        Raises:
          ValueError: a key is missing or has a value that this family can't have here.
        """
        keys: Keys | None = Keys(values, place)
        if self.section is not None:
            keys = Keys(values, place).inner(self.section)
        if keys is None:
            raise ValueError(f"{place} has no {self.section}, which describes the language model")
        for name, allowed in self.required.items():
            if name in keys.values and not any(keys.values[name] == value for value in allowed):
                raise keys.wrong(name, f"{' or '.join(map(repr, allowed))}, as no {self.model_type} here has another")
        settings: dict[str, Any] = dict(self.fixed)
        moe: dict[str, Any] = dict(settings.pop("moe", {}))
        for key in self.keys:
            value = key.value(keys)
            for name in key.fields:
                section, _, inner = name.rpartition(".")
                (moe if section == "moe" else settings)[inner] = value
        settings |= {name: derive(settings) for name, derive in self.derived.items()}
        settings |= settings_of(self.rule.read(keys))
        try:
            return GPTConfig(**settings, moe=MoEConfig(**moe) if moe else None)
        except ValueError as error:
            raise ValueError(f"{place} describes a model that can't be: {error!s:.300}") from None

    def write_config(self, config: GPTConfig) -> dict[str, Any]:
        """A config.json for a model.

        Raises:
          ValueError: this family can't express the model; the message says which settings stand in the way.
        """
        if self.section is not None:
            raise ValueError(f"{self.model_type} holds more than a language model")
        if config.moe is None and any(name.startswith("moe.") for key in self.keys for name in key.fields):
            raise ValueError(f"{self.model_type} has a mixture of experts")
        kinds = kinds_of(config)
        written: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.model_type}
        written |= {name: allowed[0] for name, allowed in self.required.items()}
        for key in self.keys:
            value = _setting(config, key.fields[0])
            if value is None or key.back is None:
                written[key.name] = value
            else:
                written[key.name] = key.back(value)
        try:
            written |= self.rule.write(kinds)
            again = self.read_config(written, "the written config.json")
        except ValueError as error:
            raise ValueError(f"{self.model_type} can't express it: {error}") from None
        if differing := _differences(config, again):
            raise ValueError(f"{self.model_type} has {', '.join(differing)}")
        return written

    def is_unused(self, name: str) -> bool:
        """Whether transformers doesn't use a tensor of this name either."""
        return any(name.startswith(part) or name.endswith(part) for part in self.unused)


def _setting(config: GPTConfig, name: str) -> Any:
    section, _, inner = name.rpartition(".")
    return getattr(config.moe if section == "moe" else config, inner, None)


def _differences(config: GPTConfig, again: GPTConfig) -> list[str]:
    """What a config that was written and read again has, where it isn't what the first one has."""
    found = []
    skipped = _RUN_FIELDS | _LAYER_FIELDS | {"moe"} | ({"mlp_width"} if config.moe is not None else set())
    for name in (entry.name for entry in dataclasses.fields(config) if entry.name not in skipped):
        if (ours := getattr(config, name)) != (theirs := getattr(again, name)):
            found.append(f"{name}={theirs!r}, not {ours!r}")
    if (config.moe is None) != (again.moe is None):
        found.append("a mixture of experts" if config.moe is None else "no mixture of experts")
    elif config.moe is not None:
        for name in (entry.name for entry in dataclasses.fields(config.moe) if entry.name not in _TRAINING_FIELDS):
            if (ours := getattr(config.moe, name)) != (theirs := getattr(again.moe, name)):
                found.append(f"moe.{name}={theirs!r}, not {ours!r}")
    kinds = zip(kinds_of(config), kinds_of(again), strict=False)
    for layer, (ours, theirs) in enumerate(kinds):
        if ours != theirs:
            found.append(f"in layer {layer} {theirs}, not {ours}")
            break
    return found
