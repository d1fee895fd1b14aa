"""Shards each sequence of a batch over the devices of `mesh.context`, in the threads that read it.

A device holds the part [r·T/R, (r + 1)·T/R) of each array, whichever tokens these are. All arrays of a sequence have
the same order, and `token_order` has the index in the sequence of each token, so that nothing downstream depends on the
sharding.

Shapes: T tokens in a sequence, R devices along `mesh.context`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Int32, Shaped

from kernels import Bounds, Mask
from kernels.context import SequenceSharding, check_sequence_sharding, shard_sequence
from trainer.config import TrainConfig

PackedSequence = Mapping[str, Shaped[np.ndarray, " T"]]


@dataclass(frozen=True)
class SequenceSharder:
    """Shards sequences over devices.

    Args:
        sequence_sharding: how.
        sequence_length: T.
        num_ranks: R.
        masks: the model's, each with the number of its layers; one of wider heads than the model's counts for more.
        keep_documents_apart: as in `DataConfig`; False: a sequence costs what one document costs.

    Raises:
        ValueError: sequences of this length can't be sharded like that.
    """

    sequence_sharding: SequenceSharding
    sequence_length: int
    num_ranks: int
    masks: Mapping[Mask, float]
    keep_documents_apart: bool

    def __post_init__(self):
        check_sequence_sharding(self.sequence_sharding, self.sequence_length, self.num_ranks)

    @classmethod
    def of(cls, config: TrainConfig, sequence_sharding: SequenceSharding) -> SequenceSharder:
        """The sharder of a run's training and validation sequences."""
        masks: defaultdict[Mask, float] = defaultdict(float)
        for layer, num_layers in config.model.layer_counts.items():
            masks[layer.mask] += num_layers * layer.head_dim / config.model.head_dim
        return cls(
            sequence_sharding,
            config.sequence_length,
            config.mesh.context,
            masks,
            config.data.keep_documents_apart,
        )

    def __call__(self, sequence: PackedSequence) -> PackedSequence:
        """The sequence's arrays in the order of the ranks, and `token_order`; `contiguous` changes and adds nothing."""
        if self.sequence_sharding == "contiguous":
            return sequence
        q_end: Any = sequence.get("q_end")
        if self.sequence_sharding == "zigzag" or not self.keep_documents_apart:
            token_order = self._same_order
        elif q_end is None:
            token_order = self._order_of(segment_ids=sequence["segment_ids"], positions=sequence["positions"])
        else:  # positions restart at each branch of a tree; by indices, its cost is about right
            token_order = self._order_of(segment_ids=sequence["segment_ids"], bounds=Bounds(q_end=q_end))
        return {name: array[token_order] for name, array in sequence.items()} | {"token_order": token_order}

    @cached_property
    def _same_order(self) -> Int32[np.ndarray, " T"]:
        """The token order of every sequence, if it doesn't depend on the documents."""
        return self._order_of()

    def _order_of(self, **of_tokens: Any) -> Int32[np.ndarray, " T"]:
        return shard_sequence(
            self.sequence_sharding, self.sequence_length, self.num_ranks, masks=self.masks, **of_tokens
        )
