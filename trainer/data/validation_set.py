"""The fixed sequences that a run's validation loss is measured on.

Shapes: T tokens in a sequence.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from trainer.config import SourceConfig
from trainer.data.batch_reader import BatchReader, BatchShare
from trainer.data.corpora import Corpus
from trainer.data.packing import PackedSequences
from trainer.data.sequence_sharding import SequenceSharder
from trainer.data.token_cache import OnProgress
from trainer.data.tokenizers import Tokenizer
from trainer.data.tree_packing import PackedTrees, pack

# A tokenizer may spell the first token of a text, without the space before it, say, otherwise than those that follow.
_NUM_TOKENS_BEFORE = 16


@dataclass(frozen=True)
class ValidationSet:
    """Packed validation sequences, the same ones at every call.

    Args:
        sequences: all validation documents, packed.
        chosen: the numbers of the sequences that are evaluated.
        sources: of a mixture: the source of each of them, those of one source together; empty: it is no mixture.
    """

    sequences: PackedSequences
    chosen: tuple[int, ...]
    sources: tuple[str, ...] = ()

    @classmethod
    def choose(
        cls,
        corpus: Corpus,
        *,
        sequence_length: int,
        num_sequences: int,
        sources: Sequence[SourceConfig] = (),
        on_progress: OnProgress = lambda line: None,
    ) -> ValidationSet:
        """Chooses sequences that are evenly spread over the packed validation split, or over that of each source.

        A mixture's sequences are divided among its sources by their weights, each having one at least. A loss over all
        targets is so that of the mixture, up to the rounding to whole sequences.

        Args:
            corpus: the corpus.
            sequence_length: T.
            num_sequences: sequences in all; fewer where the validation documents don't fill as many, and more where a
                mixture has more sources.
            sources: of the mixture; others of the corpus aren't evaluated.
            on_progress: called with a line if their number is another.
        """
        sizes = [len(each.validation) for each in corpus.sources.values()] if sources else None
        sequences = pack(corpus.validation, sequence_length, sizes)
        weights = [1.0]
        if sources:
            by_name = {source.name: source.weight for source in sources}
            weights = [by_name.get(name, 0.0) for name in corpus.sources]
        chosen: list[tuple[int, ...]] = []
        shares = divide(num_sequences, weights)
        firsts = accumulate(sequences.num_sequences, initial=0)
        for first, num_packed, share in zip(firsts, sequences.num_sequences, shares, strict=False):
            count = min(share, num_packed)
            # Packing puts the longest documents first, so the first sequences would not be typical.
            chosen.append(tuple(first + i * num_packed // count for i in range(count)))
        num_chosen = sum(map(len, chosen))
        if num_chosen < num_sequences:
            on_progress(
                f"validation fills {num_chosen} of the {num_sequences} sequences of {sequence_length:,} tokens "
                "that evaluation.num_sequences asks for"
            )
        elif num_chosen > num_sequences:
            on_progress(
                f"validation takes {num_chosen} sequences of {sequence_length:,} tokens, at least one of each source, "
                f"though evaluation.num_sequences={num_sequences}"
            )
        names = [name for name, numbers in zip(corpus.sources, chosen, strict=True) for _ in numbers] if sources else []
        return cls(sequences, tuple(number for numbers in chosen for number in numbers), tuple(names))

    def batches(
        self, batch_size: int, *, indices: Sequence[int] | None = None, sharder: SequenceSharder | None = None
    ) -> list[BatchShare]:
        """The sequences in batches of one source each, or one process's shares of them.

        Args:
            batch_size: sequences in every batch, over all processes; the last of each source is filled up with
                sequences whose `weights` are all 0.
            indices: in each batch, of the sequences that this process reads; None: all.
            sharder: shards each sequence over devices; None: its tokens stay in order.
        """
        read = BatchReader.of(self.sequences, batch_size, indices, sharder)
        shares = []
        for source in dict.fromkeys(self.sources) or [None]:
            own = self.sources or [None] * len(self.chosen)
            mine = [number for number, name in zip(self.chosen, own, strict=True) if name == source]
            numbers = [*mine, *[None] * (-len(mine) % batch_size)]
            for start in range(0, len(numbers), batch_size):
                shares.append(dataclasses.replace(read(numbers[start : start + batch_size]), source=source))
        return shares

    def count_bytes(self, tokenizer: Tokenizer) -> int | None:
        """Bytes of the text that the sequences' targets stand for; None for trees, chats, and an unknown tokenizer.

        The text of a whole document is known where it was tokenized here; parts of documents are decoded.

        Args:
            tokenizer: of the corpus.
        """
        if isinstance(self.sequences, PackedTrees) or self.sequences.documents.are_chats.any():
            return None
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


def divide(count: int, weights: Sequence[float]) -> list[int]:
    """Divides a count by weights, by largest remainders; whatever has a weight gets one at least.

    >>> divide(8, [0.75, 0.2, 0.05, 0.0]), divide(1, [1.0, 1.0])
    ([6, 1, 1, 0], [1, 1])
    """
    exact = [Fraction(weight) for weight in weights]  # sums of floats differ between versions of Python
    quotas = [count * weight / sum(exact) for weight in exact]
    shares = [max(int(quota), 1) if quota else 0 for quota in quotas]
    for index in sorted(range(len(quotas)), key=lambda index: shares[index] - quotas[index]):
        if quotas[index] and sum(shares) < count:
            shares[index] += 1
    return shares
