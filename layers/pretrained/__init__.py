"""Pretrained models in and out: Hugging Face folders, read into shards and written, every bit of them.

Each family is one literal table under `families`.
"""

from layers.pretrained.load import config_from_huggingface, load_gpt, read_params
from layers.pretrained.save import write_huggingface

__all__ = ["config_from_huggingface", "load_gpt", "read_params", "write_huggingface"]
