"""A family of pretrained models: one literal table of its settings and one of its tensors, read in both directions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kernels import CausalMask
from layers.config import GPTConfig, MoEConfig
from layers.pretrained.config_keys import Key, Keys
from layers.pretrained.layer_kinds import LayerKind, LayerRule, kinds_of, mask_of, settings_of
from layers.pretrained.safetensors_file import Tensor
from layers.pretrained.steps import TensorRow
from layers.rope_scaling import RopeScaling

# Fields of a config that change how a model runs or is trained, but not its outputs.
_RUN_FIELDS = frozenset(
    ("implementation", "decode_implementation", "remat", "scan_layers", "compute_dtype", "param_dtype")
)
_TRAINING_FIELDS = frozenset(("load_balance_loss_weight", "router_z_loss_weight"))
# Keys that every model of transformers 5 obeys, with the values that they may have here.
_EVERYWHERE: Mapping[str, tuple[Any, ...]] = {"is_causal": (True,), "per_layer_config": (None,)}
# These are compared layer by layer.
_LAYER_FIELDS = frozenset(("masks", "layer_overrides", "rope_base", "rope_scaling", "rope_fraction"))


class Inexpressible(ValueError):
    """A family has no model that computes what another does: `differences` are its values, and the model's."""

    def __init__(self, model_type: str, differences: Sequence[str]):
        super().__init__(f"{model_type} has {', '.join(differences)}")
        self.differences = tuple(differences)


@dataclass(frozen=True)
class Family:
    """A family of models: one model type of transformers.

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
      quantization: the `quant_method` of weights that `adapt` unpacks; None: none is read.
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
    quantization: str | None = None
    section: str | None = None

    def read_config(self, values: Mapping[str, Any], path: str) -> GPTConfig:
        """The config of a model of a config.json's values.

        Raises:
          ValueError: a key is missing or has a value that this family can't have here.
        """
        whole = Keys(values, path)
        keys = whole if self.section is None else whole.inner(self.section)
        if keys is None:
            raise ValueError(f"{path} has no {self.section}, which describes the language model")
        # transformers 4 takes it from the section, and transformers 5 from the whole.
        if len({part.values.get("tie_word_embeddings", True) is True for part in (whole, keys)}) > 1:
            raise whole.wrong("tie_word_embeddings", f"what {self.section} has, as by default true")
        for part in (whole, keys):
            self._check_values(part, _EVERYWHERE)
            self._check_quantization(part)
        self._check_values(keys, self.required)
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
            raise ValueError(f"{path} describes a model that can't be: {error!s:.300}") from None

    @property
    def has_experts(self) -> bool:
        """True if the family's models are mixtures of experts."""
        return any(name.startswith("moe.") for key in self.keys for name in key.fields)

    def _check_values(self, keys: Keys, rules: Mapping[str, tuple[Any, ...]]) -> None:
        for name, allowed in rules.items():
            if name in keys.values and not any(keys.values[name] == value for value in allowed):
                raise keys.wrong(name, f"{' or '.join(map(repr, allowed))}, as no {self.model_type} here has another")

    def _check_quantization(self, keys: Keys) -> None:
        """Refuses weights that are quantized: their tensors would look damaged, and `trainer.compile` reads none."""
        if "quantization_config" not in keys:
            return
        found = keys.inner("quantization_config")
        method = None if found is None else found.values.get("quant_method")
        if method is None or method != self.quantization:
            raise ValueError(
                f"{keys.path} has quantization_config.quant_method={method!r:.200}; expected weights that aren't "
                f"quantized{f', or by {self.quantization}' if self.quantization else ''}; take the folder of the model "
                "that they were made from"
            )

    def write_config(self, config: GPTConfig) -> dict[str, Any]:
        """A config.json for a model; raises Inexpressible if this family has no such model."""
        if self.section is not None:
            raise Inexpressible(self.model_type, ["more than a language model"])
        if self.has_experts != (config.moe is not None):
            raise Inexpressible(
                self.model_type, [f"{'a' if self.has_experts else 'no'} mixture of experts in model.moe"]
            )
        differing: list[str] = []
        try:
            written = self._write(config)
        except ValueError as error:  # no family has such layers
            differing.append(str(error))
            config = dataclasses.replace(config, masks=(CausalMask(),), layer_overrides=(), rope_scaling=RopeScaling())
            written = self._write(config)
        try:
            differing += _differences(config, self.read_config(written, "the written config.json"))
        except ValueError as error:
            differing.append(str(error))
        if differing:
            raise Inexpressible(self.model_type, differing)
        return written

    def _write(self, config: GPTConfig) -> dict[str, Any]:
        written: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.model_type}
        written |= {name: allowed[0] for name, allowed in self.required.items()}
        for key in self.keys:
            value = _setting(config, key.fields[0])
            if value is not None or key.read is Keys.number_or_null:  # the other ones can't be null
                written[key.name] = value if value is None or key.back is None else key.back(value)
        return written | self.rule.write(kinds_of(config))

    def is_unused(self, name: str) -> bool:
        """True if transformers doesn't use a tensor of this name either."""
        return any(name.startswith(part) or name.endswith(part) for part in self.unused)


def _setting(config: GPTConfig, name: str) -> Any:
    section, _, inner = name.rpartition(".")
    return getattr(config.moe if section == "moe" else config, inner, None)


def _differences(config: GPTConfig, again: GPTConfig) -> list[str]:
    """The fields that differ between a config and the one that was read from its config.json."""
    skipped = _RUN_FIELDS | _LAYER_FIELDS | {"moe"} | ({"mlp_width"} if config.moe is not None else set())
    found = [
        _difference(f"model.{name}", getattr(again, name), getattr(config, name))
        for name in (entry.name for entry in dataclasses.fields(config) if entry.name not in skipped)
    ]
    if config.moe is not None and again.moe is not None:
        found += [
            _difference(f"model.moe.{name}", getattr(again.moe, name), getattr(config.moe, name))
            for name in (entry.name for entry in dataclasses.fields(config.moe) if entry.name not in _TRAINING_FIELDS)
        ]
    first: dict[str, str] = {}  # each field's difference in the first layer that has one
    for layer, (theirs, ours) in enumerate(zip(kinds_of(again), kinds_of(config), strict=True)):
        if theirs != ours:
            where = f" in layer {layer}" if config.pattern_length > 1 else ""
            fields = zip(_layer_fields(theirs).items(), _layer_fields(ours).values(), strict=True)
            layer_fields = {name: _difference(f"model.{name}", value, own, where) for (name, value), own in fields}
            first = {name: difference for name, difference in layer_fields.items() if difference} | first
    found += first.values()
    return [difference for difference in found if difference]


def _difference(name: str, theirs: Any, ours: Any, where: str = "") -> str:
    """Describes the difference of one field, with values as on the command line; empty if there is none."""
    return "" if theirs == ours else f"{name}={theirs} (here {ours}{where})"


def _layer_fields(kind: LayerKind) -> dict[str, Any]:
    """A layer by the config's fields."""
    scaling = {f"rope_scaling.{name}": value for name, value in dataclasses.asdict(kind.rope.scaling).items()}
    rope = {"rope_base": kind.rope.base, "rope_fraction": kind.rope.fraction}
    return {"masks": repr(mask_of(kind.window))} | rope | scaling  # str draws a mask
