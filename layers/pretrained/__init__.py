"""Pretrained models in and out: Hugging Face folders, read into shards and written, every bit of them.

Each family is one literal table under `families`. What is exported here loads with its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layers.pretrained.load import config_from_huggingface, load_gpt, read_params
    from layers.pretrained.save import write_huggingface

_MODULE_OF = {
    "config_from_huggingface": "layers.pretrained.load",
    "load_gpt": "layers.pretrained.load",
    "read_params": "layers.pretrained.load",
    "write_huggingface": "layers.pretrained.save",
}

__all__ = ["config_from_huggingface", "load_gpt", "read_params", "write_huggingface"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'layers.pretrained' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)
