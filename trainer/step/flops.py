"""FLOPs of a training step and the device's peak: the two sides of model FLOPs utilisation (MFU).

The count is that of PaLM's appendix B (arXiv:2204.02311), forward and backward: 6 per matmul parameter and token, or 4
if the parameter is frozen and has no gradient, 12 per query head, head feature and attended pair. Norms, softmax, the
optimizer and what rematerialisation recomputes don't count.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from kernels import LocalMask, Mask, count_allowed_pairs
from layers import GPTConfig, LoRAConfig
from layers.lora_config import matrix_sides

# Dense bfloat16 FLOP/s of one JAX device, by device_kind. The first pattern that matches fully counts.
# GPU: the data sheets at nvidia.com/en-us/data-center (h100, h200, a100, l40s, l4, dgx-b200), whose figures "with
# sparsity" are halved. TPU: docs.cloud.google.com/tpu/docs/v4, v5e, v5p, v6e; only those whose device is a whole chip.
PEAK_BF16_FLOPS: tuple[tuple[str, float], ...] = (
    (r"NVIDIA B200", 2250e12),
    (r"NVIDIA (GH|H)200 NVL", 835e12),
    (r"NVIDIA (GH|H)200.*", 989e12),
    (r"NVIDIA H100 NVL", 835e12),
    (r"NVIDIA H100 PCIe", 756e12),
    (r"NVIDIA H100 .*", 989e12),
    (r"NVIDIA A100.*", 312e12),
    (r"NVIDIA L40S", 362e12),
    (r"NVIDIA L4", 121e12),
    (r"TPU v4", 275e12),
    (r"TPU (v5e|v5 lite)", 197e12),
    (r"TPU (v5p|v5)", 459e12),
    (r"TPU (v6e|v6 lite)", 918e12),
)


class StepFlops(NamedTuple):
    """FLOPs of one step over all devices, counted in two ways."""

    causal: int
    """Counts only tokens of documents, and only pairs that mask and document boundaries allow."""
    noncausal: int
    """PaLM's count: every token of the batch, and all T² pairs of each sequence in every layer."""


class FlopCounter:
    """Counts a batch's FLOPs on the host, from its documents.

    The pairs of each document length are counted once and remembered. If a mask allows no later token and its rows are
    intervals, all lengths are counted at once.

    Args:
      config: the model.
      sequence_length: T, and the length of the longest document.
      keep_documents_apart: as in `DataConfig`; False: all tokens of a sequence are one document.
      lora: the adapters; None: all parameters train.

    >>> config = GPTConfig(vocab_size=256, num_layers=1, width=8, num_heads=1, num_kv_heads=1, head_dim=8, mlp_width=8)
    >>> FlopCounter(config, 4)(np.array([[1, 1, 2, 2]]))  # 4 · 6 · 2432 and 12 · 8 · (3 + 3 of 16)
    StepFlops(causal=58944, noncausal=59904)
    """

    def __init__(
        self,
        config: GPTConfig,
        sequence_length: int,
        *,
        keep_documents_apart: bool = True,
        lora: LoRAConfig | None = None,
    ):
        self._keep_documents_apart = keep_documents_apart
        self._num_heads = config.num_heads
        self._flops_per_token = 6 * num_matmul_parameters(config)
        if lora is not None and lora.rank is not None:
            num_head = config.width * config.vocab_size if lora.embeddings and config.tie_embeddings else 0
            num_frozen = num_matmul_parameters(config) - num_head
            self._flops_per_token += 6 * num_adapter_parameters(config, lora) - 2 * num_frozen
        self._sequence_length = sequence_length
        # Of all layers that have a mask together.
        self._flops_per_pair: Counter[Mask] = Counter()
        for layer, num_layers in config.layer_counts.items():
            self._flops_per_pair[layer.mask] += 12 * num_layers * layer.head_dim
        # Of the newest width alone, where a window has a schedule.
        remember = functools.lru_cache(maxsize=len(self._flops_per_pair))
        self._pairs_by_length = remember(functools.partial(_make_pairs_by_length, longest=sequence_length))

    def __call__(self, segment_ids: Int[np.ndarray, "B T"], step: int = 1) -> StepFlops:
        """FLOPs of a step on this batch.

        Args:
          segment_ids: document of each token, 0 for padding; a document is one run of equal ids.
          step: of the run, from 1. Scheduled windows have its width.
        """
        return self.of_documents([_document_lengths(row) for row in segment_ids], step)

    def of_documents(self, lengths: Sequence[Int[np.ndarray, " D"]], step: int = 1) -> StepFlops:
        """FLOPs of a step on a batch of documents of these lengths.

        Args:
          lengths: of the documents of each sequence, in tokens. A negative one is taken off: tokens [a, b) of a branch
            of a tree cost what a document of b tokens costs, without one of a.
          step: as for a call.
        """
        num_tokens = len(lengths) * self._sequence_length
        if not self._keep_documents_apart:
            lengths = [each.sum(keepdims=True) for each in lengths if len(each)]
        signed = np.concatenate([np.zeros(0, np.int64), *lengths])
        of_all, which = np.unique(np.abs(signed), return_inverse=True)
        counts = np.bincount(which, weights=np.sign(signed), minlength=len(of_all)).astype(np.int64)
        of_causal_pairs = sum(
            flops * int(self._pairs(mask, of_all, step) @ counts) for mask, flops in self._flops_per_pair.items()
        )
        all_pairs = self._num_heads * num_tokens * self._sequence_length
        return StepFlops(
            int(of_all @ counts) * self._flops_per_token + of_causal_pairs,
            num_tokens * self._flops_per_token + all_pairs * self._flops_per_pair.total(),
        )

    def _pairs(self, mask: Mask, lengths: np.ndarray, step: int) -> np.ndarray:
        """Pairs allowed in one layer, over all its query heads, in documents of these lengths."""
        # A mask sees positions that count from 0 in each document, so the length alone decides.
        if (window := mask.scheduled_window) is not None:
            mask &= LocalMask(int(window.width(step)) - 1, 0)
        table = self._pairs_by_length(mask)
        for length in lengths[table[lengths] < 0]:
            table[length] = count_allowed_pairs(mask, int(length), int(length))
        return table[lengths] * (self._num_heads if mask.num_heads is None else 1)


def num_matmul_parameters(config: GPTConfig) -> int:
    """Parameters that every token is multiplied by. The head counts; the embedding, a lookup, doesn't.

    Of a mixture of experts the router counts, and as many experts as a token goes to.
    """
    attention = sum(
        num_layers * config.width * layer.head_dim * 2 * (config.num_heads + layer.num_kv_heads)
        for layer, num_layers in config.layer_counts.items()
    )
    moe, num_matrices = config.moe, 2 if config.mlp == "gelu" else 3
    mlp = config.width * (
        num_matrices * config.mlp_width
        if moe is None
        else num_matrices * moe.num_experts_per_token * moe.expert_width + moe.num_experts
    )
    return attention + config.num_layers * mlp + config.width * config.vocab_size


def num_adapter_parameters(config: GPTConfig, lora: LoRAConfig) -> int:
    """Parameters of adapters that every token is multiplied by, those of as many experts as it goes to."""
    assert lora.rank is not None, "there are adapters"
    names, num_experts = lora.matrices(config), 1 if config.moe is None else config.moe.num_experts_per_token
    return sum(
        num_layers * lora.rank * sum(matrix_sides(config, layer)[name]) * (num_experts if ".experts." in name else 1)
        for layer, num_layers in config.layer_counts.items()
        for name in names
    )


def _document_lengths(segment_ids: Int[np.ndarray, " T"]) -> Int[np.ndarray, " D"]:
    """Lengths of the runs of equal ids, without padding."""
    starts = np.flatnonzero(np.diff(segment_ids, prepend=segment_ids[0] + 1))
    lengths = np.diff(starts, append=segment_ids.size)
    return lengths[segment_ids[starts] != 0]


def _make_pairs_by_length(mask: Mask, longest: int) -> np.ndarray:
    """Pairs allowed in a document of each length 0..longest; −1: not counted yet."""
    table = _causal_pairs(mask, longest)
    return np.full(longest + 1, -1) if table is None else table


def _causal_pairs(mask: Mask, longest: int) -> np.ndarray | None:
    """Pairs allowed in a document of each length 0..longest, or None if a longer one changes earlier rows."""
    interval = None if mask.looks_ahead or mask.num_heads is not None else mask.row_interval(np.arange(longest))
    if interval is None:
        return None
    first, last = interval
    return np.concatenate([[0], np.cumsum(np.maximum(last - np.maximum(first, 0) + 1, 0))])


def peak_flops_per_s(device: jax.Device, compute_dtype: str) -> float | None:
    """The vendor's figure for a device's matmuls, in FLOP/s; None where it publishes none, and there is no MFU.

    No peak is measured in its place: on a CPU that other programs use, it differs by half from one start to the next.

    Args:
      device: of the mesh.
      compute_dtype: type of the matmuls' operands; the figures are for bfloat16.
    """
    # The name of a MIG slice begins with the whole GPU's.
    if jnp.dtype(compute_dtype) != jnp.bfloat16 or "MIG" in device.device_kind:
        return None
    figures = (figure for pattern, figure in PEAK_BF16_FLOPS if re.fullmatch(pattern, device.device_kind))
    return next(figures, None)
