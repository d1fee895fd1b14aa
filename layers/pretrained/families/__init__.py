"""The known families, in the order in which a config that names none is tried.

A new family is a table in one of the files beside this one, and a line here.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from layers.pretrained.family import Family

MODULES: Mapping[str, str] = {
    "llama": "layers.pretrained.families.llama",
    "mistral": "layers.pretrained.families.mistral",
    "qwen2": "layers.pretrained.families.qwen",
    "qwen3": "layers.pretrained.families.qwen",
    "qwen3_moe": "layers.pretrained.families.qwen",
    "mixtral": "layers.pretrained.families.mistral",
    "gemma2": "layers.pretrained.families.gemma",
    "gemma3_text": "layers.pretrained.families.gemma",
    "gemma3": "layers.pretrained.families.gemma",
    "olmo2": "layers.pretrained.families.olmo",
    "olmo3": "layers.pretrained.families.olmo",
    "smollm3": "layers.pretrained.families.llama",
    "phi3": "layers.pretrained.families.llama",
    "gpt_oss": "layers.pretrained.families.gpt_oss",
}
"""The module of each model type; its `FAMILIES` are the tables."""


def find_family(model_type: object, path: str) -> Family:
    """The family of a model type that a config.json at a path has; ValueError if it isn't known."""
    if not isinstance(model_type, str) or model_type not in MODULES:
        raise ValueError(f"{path} has model_type={model_type!r:.200}; expected one of {', '.join(MODULES)}")
    families = importlib.import_module(MODULES[model_type]).FAMILIES
    return next(family for family in families if family.model_type == model_type)
