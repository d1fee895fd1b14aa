"""Prompts and answers are split where a model that continues the prompt can write the answer."""

import numpy as np

from trainer.data import ByteTokenizer
from trainer.evaluate.tasks.encoding import encode_question


class PairTokenizer(ByteTokenizer):
    """A token for each two bytes, and for the last one: a token may span words."""

    vocab_size = 2**16 + 256

    def encode(self, text):
        data = text.encode()
        return [256 + 256 * pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in zip_pairs(data)]

    def encode_documents(self, documents):
        return [np.array(self.encode(document.decode()), "<u4") for document in documents]

    def decode(self, token_ids):
        data = b"".join(bytes([i]) if i < 256 else bytes(divmod(i - 256, 256)) for i in map(int, token_ids))
        return data.decode()


def zip_pairs(data):
    return [data[first : first + 2] for first in range(0, len(data), 2)]


def test_an_answer_begins_after_the_prompt(tokenizer):
    question = encode_question(tokenizer, "The special number is", ["1234567", "abcdef"])
    assert question.text == "1234567, abcdef"
    assert tokenizer.decode(question.prompt).strip() == "The special number is"
    assert tokenizer.decode(question.answer).strip() == question.text


def test_an_answer_begins_before_a_token_that_spans_both():
    tokenizer = PairTokenizer()
    for prompt in ("Number:", "Numbers:"):
        question = encode_question(tokenizer, prompt, ["12345"])
        tokens = [*question.prompt, *question.answer]
        assert tokens == tokenizer.encode(f"{prompt} 12345")
        assert tokenizer.decode(question.prompt) == prompt[: len(prompt) // 2 * 2]
        assert tokenizer.decode(tokens).endswith(question.text)
