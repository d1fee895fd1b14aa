"""Questions that share a context get the answers that each would get after a prompt of its own."""

import dataclasses

import jax
import numpy as np
import pytest

from kernels import CausalMask, ChunkedCausalMask, FullMask, LocalMask
from layers import GPTConfig, LayerOverride
from layers.pretrained.table import parameter_shapes
from tests.layers.decoder_oracle import decoder_logits
from trainer.data import ByteTokenizer
from trainer.evaluate.decoding import ContextDecoder
from trainer.evaluate.results import Line
from trainer.evaluate.retrieval import make_decoder, mean_scores, score_example
from trainer.evaluate.tasks import NOISE, TASKS, make_examples

MODEL = GPTConfig(
    vocab_size=64,
    num_layers=3,
    width=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp_width=32,
    masks=(CausalMask() & LocalMask(70, 0), ChunkedCausalMask(100) | CausalMask() & LocalMask(20, 0), CausalMask()),
    layer_overrides=(LayerOverride(), LayerOverride(num_kv_heads=1, head_dim=8), LayerOverride()),
    sinks=True,
    logits_soft_cap=20.0,
    compute_dtype="float32",
)
# The tokenizer's ids; the model has some more, which it must not choose.
NUM_IDS = 60


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(3)
    return jax.tree.map(lambda leaf: rng.normal(0, 0.6, leaf.shape).astype(np.float32), parameter_shapes(MODEL))


def greedy(params, tokens, count):
    tokens = [*map(int, tokens)]
    for _ in range(count):
        tokens.append(int(decoder_logits(MODEL, params, np.array(tokens))[-1, :NUM_IDS].argmax()))
    return tokens[-count:]


def draw(rng, count):
    return rng.integers(0, NUM_IDS, count).astype(np.int32)


def test_a_shared_context_answers_as_whole_prompts_do(params, rng):
    decoder = ContextDecoder(
        MODEL, length=320, shortest=290, num_questions=3, longest_prompt=20, longest_answer=5, vocab_size=NUM_IDS
    )
    laid_out = decoder.lay_out(params)
    # More questions than are answered at once, and then another context, shorter, in the same slots.
    for length, prompt_lengths in ((320, [20, 1, 7, 16]), (290, [3])):
        context, prompts = draw(rng, length), [draw(rng, count) for count in prompt_lengths]
        answers = decoder.answer(laid_out, context, prompts)
        assert answers == [greedy(params, [*context, *prompt], 5) for prompt in prompts]


def test_an_answer_ends_where_no_more_is_wanted(params, rng):
    decoder = ContextDecoder(
        MODEL, length=140, shortest=140, num_questions=2, longest_prompt=4, longest_answer=6, vocab_size=NUM_IDS
    )
    context, prompts, heard = draw(rng, 140), [draw(rng, 4), draw(rng, 3)], []

    def is_whole(question, answer):
        heard.append((question, len(answer)))
        return len(answer) == (2, 4)[question]

    answers = decoder.answer(decoder.lay_out(params), context, prompts, is_whole)
    assert answers == [greedy(params, [*context, *prompts[0]], 2), greedy(params, [*context, *prompts[1]], 4)]
    assert heard == [(0, 1), (1, 1), (0, 2), (1, 2), (1, 3), (1, 4)]


def test_memory_is_that_of_one_context_and_the_questions():
    sizes = {"length": 4096, "shortest": 4000, "longest_prompt": 30, "longest_answer": 40, "vocab_size": NUM_IDS}
    slot_bytes = 2 * 4 * (2 * 2 * 4 + 1 * 8)  # keys and values in float32, of two kinds of layers
    for num_questions in (1, 100):
        decoder = ContextDecoder(MODEL, num_questions=num_questions, **sizes)
        assert decoder.cache_bytes == slot_bytes * (4096 + 128 * num_questions)


def test_a_mask_that_looks_ahead_is_refused():
    sizes = {"length": 64, "shortest": 64, "num_questions": 1, "longest_prompt": 1, "longest_answer": 1}
    looks_ahead = dataclasses.replace(MODEL, masks=(FullMask(),), layer_overrides=())
    with pytest.raises(ValueError, match="only look back"):
        ContextDecoder(looks_ahead, vocab_size=NUM_IDS, **sizes)


class Planted:
    """Takes a decoder's place: it answers as it is told to, after some words, and hears whether that is enough."""

    def __init__(self, answers):
        self._answers = answers

    def answer(self, params, context, prompts, is_whole):
        taken = []
        for number, answer in enumerate(self._answers):
            given = []
            for token in answer:
                given.append(token)
                if is_whole(number, given):
                    break
            taken.append(given)
        return taken


def examples_of(task, **changes):
    sizes = {"num_examples": 4, "num_questions": 3, "depths": (0.0, 1.0), "tokenizer": ByteTokenizer(), "seed": 7}
    return make_examples(task, 3000, haystack=NOISE, **sizes | changes)


@pytest.mark.parametrize("task", TASKS)
def test_a_perfect_copier_scores_all_and_a_shuffled_one_nothing(task):
    tokenizer, scores, shuffled = ByteTokenizer(), [], []
    examples = examples_of(task)
    for example, other in zip(examples, [*examples[1:], examples[0]], strict=True):
        right = [[*b"It is ", *question.answer.tolist(), *b" for sure."] for question in example.questions]
        wrong = [[*question.answer.tolist(), 256, *right[0]] for question in other.questions]
        scores.append(score_example(Planted(right), None, example, tokenizer))
        shuffled.append(score_example(Planted(wrong), None, example, tokenizer))
    lines = list(mean_scores(examples, scores))
    assert all(line.accuracy == 1 for line in lines)
    assert sum(line.num_examples for line in lines) == sum(len(example.questions) for example in examples)
    assert {line.depth for line in lines} == ({0.0, 1.0} if TASKS[task].takes_depth else {None})
    assert np.mean(np.concatenate(shuffled)) <= 0.05  # words may be in both


def test_accuracy_is_the_mean_over_the_questions_of_a_depth():
    examples = examples_of("niah_single")
    lines = list(mean_scores(examples, [[1, 0, 0], [1, 1, 1], [1, 1, 0], [1, 1, 1]]))
    assert lines == [
        Line("retrieval", 3000, "niah_single", 0.0, accuracy=0.5, num_examples=6),
        Line("retrieval", 3000, "niah_single", 1.0, accuracy=1.0, num_examples=6),
    ]


def test_a_decoder_has_room_for_every_example():
    tokenizer = ByteTokenizer()
    examples = [*examples_of("niah_single"), *examples_of("variable_tracking")]
    model = dataclasses.replace(MODEL, vocab_size=257)
    decoder = make_decoder(model, examples, tokenizer)
    assert decoder._num_shared == min(len(example.context) for example in examples) // 128 * 128
    most = max(len(question.answer) for example in examples for question in example.questions)
    assert decoder._num_new == most + 16
