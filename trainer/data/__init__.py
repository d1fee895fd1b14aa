"""From files to batches: corpora, tokenizers, packing and resumable iterators. Nothing here touches a device."""

from trainer.data.batch_reader import BatchShare
from trainer.data.batches import make_batches, make_train_batches, make_train_iterator
from trainer.data.corpora import Corpus, load_corpus
from trainer.data.documents import Documents
from trainer.data.packing import PackedSequences
from trainer.data.sequence_sharding import SequenceSharder
from trainer.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, load_tokenizer
from trainer.data.train_iterator import TrainIterator
from trainer.data.validation_set import ValidationSet
from trainer.errors import DataError

__all__ = [
    "BatchShare",
    "ByteTokenizer",
    "Corpus",
    "DataError",
    "Documents",
    "HuggingFaceTokenizer",
    "PackedSequences",
    "SequenceSharder",
    "Tokenizer",
    "TrainIterator",
    "ValidationSet",
    "load_corpus",
    "load_tokenizer",
    "make_batches",
    "make_train_batches",
    "make_train_iterator",
]
