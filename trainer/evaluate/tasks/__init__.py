"""Synthetic retrieval tasks by RULER's definitions (arXiv:2404.06654), generated offline from a seed and any text.

Which of RULER's variants each task is:

| task | RULER's | in a context | asked for |
|---|---|---|---|
| `niah_single` | single 1 and 2 | one needle for each question | its value |
| `niah_multikey` | multikey 1 | three needles more, of other keys | the value of one key |
| `niah_multivalue` | multivalue | four needles of one key | all values of the key |
| `niah_multiquery` | multiquery | four needles of four keys | the values of all four |
| `variable_tracking` | vt | a chain of one assignment and four hops | the five variables of a value |
| `common_words` | cwe | ten words 30 times each, the others 3 times | the ten words |
| `frequent_words` | fwe | words with frequencies of a zeta distribution | the three most frequent |

Keys are pairs of words and values are numbers of seven digits. Keys and values of UUIDs (single 3, multikey 3) are left
out: they mostly measure how well a tokenizer's rare tokens are copied. So is the haystack of needles alone (multikey
2), since any text is a haystack here, and the questions on SQuAD and HotpotQA, which need a download.

These differ from RULER. Each context begins at another line of the haystack. An answer separates its parts by commas.
Values of a key and common words are answered in the order in which the context has them first, so that a text has one
answer. The words of `common_words` are made of syllables: a million tokens need more words than a dictionary has. A
context may have several questions, each with needles or a chain of its own.

`key_values` is none of RULER's, and simpler: lines of a key and a word, so that a model of two layers can learn it.
"""

from trainer.evaluate.tasks.documents import make_documents, write_documents
from trainer.evaluate.tasks.example import Example, Question, score
from trainer.evaluate.tasks.generate import RULER, TASKS, make_examples
from trainer.evaluate.tasks.haystack import NOISE

__all__ = [
    "NOISE",
    "RULER",
    "TASKS",
    "Example",
    "Question",
    "make_documents",
    "make_examples",
    "score",
    "write_documents",
]
