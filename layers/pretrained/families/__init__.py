"""The families that are known, in the order in which a config without one is tried on them.

A new family is a file beside this one and a line here.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from layers.pretrained.family import Family

MODULES: Mapping[str, str] = {
    "llama": "layers.pretrained.families.llama",
    "mistral": "layers.pretrained.families.mistral",
    "qwen2": "layers.pretrained.families.qwen2",
    "qwen3": "layers.pretrained.families.qwen3",
    "qwen3_moe": "layers.pretrained.families.qwen3_moe",
    "mixtral": "layers.pretrained.families.mixtral",
    "gemma2": "layers.pretrained.families.gemma2",
    "gemma3_text": "layers.pretrained.families.gemma3",
    "gemma3": "layers.pretrained.families.gemma3_multimodal",
    "olmo2": "layers.pretrained.families.olmo2",
    "olmo3": "layers.pretrained.families.olmo3",
    "smollm3": "layers.pretrained.families.smollm3",
    "phi3": "layers.pretrained.families.phi3",
    "gpt_oss": "layers.pretrained.families.gpt_oss",
}
"""The module of each model type; its `FAMILY` is the table."""


def find_family(model_type: object, path: str) -> Family:
    """The family of a model type.

    Args:
      model_type: as a config.json has it.
      path: where it comes from, for the error message.

    Raises:
      ValueError: it isn't known.
    """
    if not isinstance(model_type, str) or model_type not in MODULES:
        raise ValueError(f"{path} has model_type={model_type!r:.200}; expected one of {', '.join(MODULES)}")
    return importlib.import_module(MODULES[model_type]).FAMILY
