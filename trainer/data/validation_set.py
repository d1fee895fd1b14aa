"""The fixed sequences that a run's validation loss is measured on.

Shapes: T tokens in a sequence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.data.batch_reader import BatchReader, BatchShare
from trainer.data.corpora import Corpus
from trainer.data.packing import PackedSequences
from trainer.data.sequence_sharding import SequenceSharder
from trainer.data.token_cache import OnProgress
from trainer.data.tokenizers import Tokenizer

# A tokenizer may spell the first token of a text, without the space before it, say, otherwise than those that follow.
_NUM_TOKENS_BEFORE = 16


@dataclass(frozen=True)
class ValidationSet:
    """Packed validation sequences, the same ones at every call.

    Args:
        sequences: all validation documents, packed.
        chosen: the numbers of the sequences that are evaluated.
    """

    sequences: PackedSequences
    chosen: tuple[int, ...]

    @classmethod
    def choose(
        cls,
        corpus: Corpus,
        *,
        sequence_length: int,
        num_sequences: int,
        on_progress: OnProgress = lambda line: None,
    ) -> ValidationSet:
        """Chooses sequences that are evenly spread over the packed validation split.

        Args:
            corpus: the corpus.
            sequence_length: T.
            num_sequences: sequences in all; fewer where the validation documents don't fill as many.
            on_progress: called with a line if they don't.
        """
        sequences = PackedSequences(corpus.validation, sequence_length)
        if len(sequences) < num_sequences:
            on_progress(
                f"validation fills {len(sequences)} of the {num_sequences} sequences of {sequence_length:,} tokens "
                "that evaluation.num_sequences asks for"
            )
            num_sequences = len(sequences)
        # Packing puts the longest documents first, so the first sequences would not be typical.
        return cls(sequences, tuple(i * len(sequences) // num_sequences for i in range(num_sequences)))

    def batches(
        self, batch_size: int, *, indices: Sequence[int] | None = None, sharder: SequenceSharder | None = None
    ) -> list[BatchShare]:
        """The sequences in batches, or one process's shares of them.

        Args:
            batch_size: sequences in every batch, over all processes; the last is filled up with sequences whose
                `target_mask` is all False.
            indices: in each batch, of the sequences that this process reads; None: all.
            sharder: shards each sequence over devices; None: its tokens stay in order.
        """
        read = BatchReader.of(self.sequences, batch_size, indices, sharder)
        numbers = [*self.chosen, *[None] * (-len(self.chosen) % batch_size)]
        return [read(numbers[start : start + batch_size]) for start in range(0, len(numbers), batch_size)]

    def count_bytes(self, tokenizer: Tokenizer) -> int | None:
        """Bytes of the text that the sequences' targets stand for; None where no tokenizer is known.

        The text of a whole document is known where it was tokenized here; parts of documents are decoded.

        Args:
            tokenizer: of the corpus.
        """
        documents, pieces, num_bytes = self.sequences.documents, self.sequences.pieces, 0
        num_before = int(documents.delimiters.begin is not None)
        for piece in (piece for number in self.chosen for piece in self.sequences.pieces_of(number).tolist()):
            # In tokens of the document. The first is a target only where a token begins documents.
            document, start = pieces.document.item(piece), pieces.start.item(piece) + 1 - num_before
            length, known = documents.table["length"].item(document), documents.table["num_bytes"].item(document)
            stop = min(start + pieces.length.item(piece), length)  # the token that ends it, a target, has no text
            if (start, stop) == (0, length) and known >= 0:
                num_bytes += known
            else:
                first = max(start - _NUM_TOKENS_BEFORE, 0)
                tokens = documents.stream(document, first + num_before, stop + num_before).tolist()
                decoded = tokenizer.num_bytes(tokens, start - first)
                if decoded is None:
                    return None
                num_bytes += decoded
        return num_bytes

    def digest(self) -> str:
        """A hex digest of the sequences' tokens and documents: equal only if the same targets are predicted."""
        digest = hashlib.sha256()
        for number in self.chosen:
            for name, array in self.sequences[number].items():
                digest.update(f"{name} {array.dtype} {array.shape} ".encode() + array.tobytes())
        return digest.hexdigest()
