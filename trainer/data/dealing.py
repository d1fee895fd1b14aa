"""Deals each sequence of a batch out to the devices of `mesh.context`, in the threads that read it.

A device holds the part [r·T/R, (r + 1)·T/R) of each array, whatever was dealt there. All arrays of a sequence are
permuted alike, and `places` tells where in the sequence each token stands, so that nothing downstream depends on how
tokens were dealt out.

Shapes: T tokens in a sequence, R devices along `mesh.context`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Int32, Shaped

from kernels import Mask
from kernels.context import Deal, check_deal, deal_tokens
from trainer.config import TrainConfig

PackedSequence = Mapping[str, Shaped[np.ndarray, " T"]]


@dataclass(frozen=True)
class Dealer:
    """Deals sequences out to devices.

    Args:
        deal: how.
        sequence_length: T.
        num_ranks: R.
        masks: the model's, each with the number of its layers; one of wider heads than the model's counts for more.
        keep_documents_apart: as in `DataConfig`; False: a sequence costs what one document costs.

    Raises:
        ValueError: sequences of this length can't be dealt out like that.
    """

    deal: Deal
    sequence_length: int
    num_ranks: int
    masks: Mapping[Mask, float]
    keep_documents_apart: bool

    def __post_init__(self):
        check_deal(self.deal, self.sequence_length, self.num_ranks)

    @classmethod
    def of(cls, config: TrainConfig, deal: Deal) -> Dealer:
        """The dealer of a run's training and validation sequences."""
        masks: defaultdict[Mask, float] = defaultdict(float)
        for layer, num_layers in config.model.layer_counts.items():
            masks[layer.mask] += num_layers * layer.head_dim / config.model.head_dim
        return cls(
            deal,
            config.sequence_length,
            config.mesh.context,
            masks,
            config.data.keep_documents_apart,
        )

    def __call__(self, sequence: PackedSequence) -> PackedSequence:
        """The sequence's arrays, dealt out, and `places`; in order there is nothing to do, and no `places`."""
        if self.deal == "in_order":
            return sequence
        is_same = self.deal == "zigzag" or not self.keep_documents_apart
        places = self._same_places if is_same else self._places(sequence["segment_ids"], sequence["positions"])
        return {name: array[places] for name, array in sequence.items()} | {"places": places}

    @cached_property
    def _same_places(self) -> Int32[np.ndarray, " T"]:
        """The deal of every sequence, if it doesn't depend on the documents."""
        return self._places(None, None)

    def _places(
        self, segment_ids: Int32[np.ndarray, " T"] | None, positions: Int32[np.ndarray, " T"] | None
    ) -> Int32[np.ndarray, " T"]:
        return deal_tokens(
            self.deal,
            self.sequence_length,
            self.num_ranks,
            masks=self.masks,
            segment_ids=segment_ids,
            positions=positions,
        )
