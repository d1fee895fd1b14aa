"""From files to batches: corpora, tokenizers, packing and resumable iterators. Nothing here touches a device."""

from trainer.data.batches import TrainIterator, make_batches, make_train_iterator, make_validation_batches
from trainer.data.corpora import Corpus, load_corpus
from trainer.data.documents import Documents
from trainer.data.errors import DataError
from trainer.data.packing import Batch, PackedSequences
from trainer.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "Batch",
    "ByteTokenizer",
    "Corpus",
    "DataError",
    "Documents",
    "HuggingFaceTokenizer",
    "PackedSequences",
    "Tokenizer",
    "TrainIterator",
    "load_corpus",
    "load_tokenizer",
    "make_batches",
    "make_train_iterator",
    "make_validation_batches",
]
