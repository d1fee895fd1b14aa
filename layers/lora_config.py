"""Which matrices of a GPT get low-rank adapters, as plain data: no Flax, no device."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

from layers.checks import check_numbers
from layers.config import GPTConfig
from layers.layer_config import LayerConfig


@dataclass(frozen=True)
class LoRAConfig:
    """Low-rank adapters (LoRA, arXiv:2106.09685): the product of two small matrices is added to each frozen one.

    Adapters and norms train in float32. All else is kept in bfloat16, without gradients and moments.
    """

    rank: int | None = None
    """Inner dimension of each adapter; None: no adapters, and all parameters train."""
    alpha: float = 32.0
    """An adapter's product is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ("*",)
    """Matrices that get an adapter, as a block's modules are named, with `*` for any characters: attention.query,
    attention.*, mlp.up, mlp.experts.down."""
    embeddings: bool = False
    """The embedding trains, too, in float32 (LongLoRA, arXiv:2309.12307), and with it a head that is tied to it."""

    def __post_init__(self):
        check_numbers(self, "lora.")
        if self.rank is not None and self.rank < 1:
            raise ValueError(f"lora.rank={self.rank} must be at least 1; None trains all parameters, without adapters")
        if not self.alpha > 0:
            raise ValueError(f"lora.alpha={self.alpha} must be positive")

    @property
    def scale(self) -> float:
        """The factor of an adapter's product."""
        assert self.rank is not None, "there are adapters"
        return self.alpha / self.rank

    def trains(self, name: str) -> bool:
        """True if a parameter trains.

        Args:
          name: its dotted path in the model: `blocks.0.mlp.up.kernel`.
        """
        if self.rank is None:
            return True
        is_embedding = name == "embedding.embedding"
        return ".lora." in name or name.endswith(".scale") or (self.embeddings and is_embedding)

    def matrices(self, model: GPTConfig) -> tuple[str, ...]:
        """The matrices of a model that get an adapter, in each of its blocks.

        Raises:
          ValueError: a target names none, or the rank is above a side of one.

        Example:
          >>> LoRAConfig(rank=8, targets=("attention.*", "mlp.up")).matrices(GPTConfig())
          ('attention.query', 'attention.key', 'attention.value', 'attention.output', 'mlp.up')
        """
        if self.rank is None:
            return ()
        of_layers = [matrix_sides(model, layer) for layer in model.layer_counts]
        sides = {name: min((each[name] for each in of_layers), key=min) for name in of_layers[0]}
        for target in self.targets:
            if not fnmatch.filter(sides, target):
                raise ValueError(
                    f"lora.targets names {target!r}, and no matrix of a block has this name; "
                    f"expected some of {', '.join(sides)}, or a pattern of them, such as attention.*"
                )
        if not self.targets:
            raise ValueError("lora.targets is empty; name at least one matrix, or leave out lora.rank")
        chosen = tuple(name for name in sides if any(fnmatch.fnmatchcase(name, target) for target in self.targets))
        for name in chosen:
            if self.rank > min(sides[name]):
                raise ValueError(
                    f"lora.rank={self.rank} is above a side of {name}, which maps {sides[name][0]} features to "
                    f"{sides[name][1]}; use at most {min(sides[name])}, or leave {name} out of lora.targets"
                )
        return chosen


def matrix_sides(model: GPTConfig, layer: LayerConfig) -> dict[str, tuple[int, int]]:
    """Features in and out of each matrix of a block, by its name; of one expert, where there are experts."""
    width, moe = model.width, model.moe
    query, key = model.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    mlp, hidden = ("mlp", model.mlp_width) if moe is None else ("mlp.experts", moe.expert_width)
    gate = {} if model.mlp == "gelu" else {f"{mlp}.gate": (width, hidden)}
    return {
        "attention.query": (width, query),
        "attention.key": (width, key),
        "attention.value": (width, key),
        "attention.output": (query, width),
        f"{mlp}.up": (width, hidden),
        **gate,
        f"{mlp}.down": (hidden, width),
    }
