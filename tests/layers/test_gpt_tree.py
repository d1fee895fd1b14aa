"""A GPT with a tree of new tokens: verification of a draft, and completions of one prompt."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kernels import CausalMask, ChunkedCausalMask, LocalMask, MultiHeadMask, TokenTree
from layers import GPT, GPTConfig, init_caches
from tests.compilations import count_compilations

WINDOW = CausalMask() & LocalMask(5, 0)
CONFIG = GPTConfig(
    vocab_size=64,
    num_layers=2,
    width=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp_width=24,
    masks=(WINDOW, MultiHeadMask([WINDOW, ChunkedCausalMask(7), CausalMask(), WINDOW])),
    sinks=True,
    logits_soft_cap=2.0,
    implementation="reference",
    compute_dtype="float32",
)
LONGEST_PROMPT, NUM_NEW, LENGTH = 14, 6, 33
pytestmark = pytest.mark.usefixtures("float64")


@nnx.jit
def run(model, tokens):
    return model.logits(model(tokens))


@nnx.jit
def prefill(model, tokens, caches, num_tokens):
    return model.prefill(tokens, caches, num_tokens=num_tokens)[1]


@nnx.jit
def decode(model, tokens, caches, parents=None, start=None):
    tree = None if parents is None else TokenTree.of_parents(parents, start)
    hidden, caches = model.decode(tokens, caches, tree=tree)
    return model.logits(hidden), caches


@jax.jit
def keep(caches, path, start, num_tokens):
    return tuple(cache.keep_path(path, start, num_tokens=num_tokens) for cache in caches)


def make_model(config, rng):
    graphdef, state = nnx.split(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))))
    return nnx.merge(graphdef, jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.5, x.shape), x.dtype), state))


class Texts:
    """Some texts with a prompt each, in the caches of a model."""

    def __init__(self, rng, tree_size):
        config = dataclasses.replace(CONFIG, compute_dtype="float64", param_dtype="float64")
        self.model = make_model(config, rng)
        lengths = (1, LONGEST_PROMPT, rng.integers(2, LONGEST_PROMPT))
        self.tokens = [rng.integers(0, 64, length).tolist() for length in lengths]
        padded = rng.integers(0, 64, (3, LONGEST_PROMPT))
        for row, text in zip(padded, self.tokens, strict=True):
            row[: len(text)] = text
        caches = init_caches(config, 3, LENGTH, tokens_per_step=tree_size)
        self.caches = prefill(self.model, padded, caches, self.lengths)

    @property
    def lengths(self):
        return np.array([len(text) for text in self.tokens])

    def extend(self, new, paths):
        for text, tokens, path in zip(self.tokens, new.tolist(), paths, strict=True):
            text += [tokens[node] for node in path]

    def logits_alone(self, new, paths):
        """Logits after each path of new tokens behind each text, from one run for each: `[text, path, vocabulary]`."""
        rows, last = np.zeros((3 * NUM_NEW, LENGTH), np.int32), []
        for text, tokens, of_text in zip(self.tokens, new.tolist(), paths, strict=True):
            for path in of_text:
                branch = text + [tokens[node] for node in path]
                rows[len(last), : len(branch)] = branch
                last.append(len(branch) - 1)
        logits = np.asarray(run(self.model, rows))
        return logits[np.arange(len(last)), last].reshape(3, -1, CONFIG.vocab_size)


def branches_of(parents):
    """The nodes from the root down to each node."""
    paths = []
    for node, parent in enumerate(parents):
        paths.append((paths[parent] if parent >= 0 else []) + [node])
    return paths


def assert_same(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


def test_verification_of_drafts(rng):
    """Two rounds of drafting and accepting, each before a token alone: each text is as if nothing had been drafted."""
    texts = Texts(rng, tree_size=NUM_NEW)
    with count_compilations() as counts:
        for _ in range(2):
            drafts = rng.integers(0, 64, (3, NUM_NEW))
            parents = np.array([[rng.integers(-1, node) for node in range(NUM_NEW)] for _ in range(3)])
            start = texts.lengths
            logits, caches = decode(texts.model, drafts, texts.caches, parents, start)
            paths = [branches_of(of_text) for of_text in parents.tolist()]
            assert_same(logits, texts.logits_alone(drafts, paths))

            accepted = [of_text[rng.integers(NUM_NEW)] for of_text in paths]
            accepted[rng.integers(3)] = []
            padded = [path + [0] * (NUM_NEW - len(path)) for path in accepted]
            texts.caches = keep(caches, np.array(padded), start, np.array([len(path) for path in accepted]))
            texts.extend(drafts, accepted)

            new = rng.integers(0, 64, (3, 1))
            logits, texts.caches = decode(texts.model, new, texts.caches)
            assert_same(logits, texts.logits_alone(new, [[[0]]] * 3))
            texts.extend(new, [[0]] * 3)
    assert counts["decode"] == 2, "one program with a tree and one without"


def test_completions_that_share_a_prompt(rng):
    """Several for each prompt, all in one sequence of the cache, a token of each in every call; then one goes on."""
    num_tokens = 3
    texts = Texts(rng, tree_size=num_tokens * NUM_NEW)
    new = rng.integers(0, 64, (3, num_tokens * NUM_NEW))
    parents, start = np.maximum(np.arange(num_tokens * NUM_NEW) - NUM_NEW, -1), texts.lengths
    paths = branches_of(parents)
    for first in range(0, num_tokens * NUM_NEW, NUM_NEW):
        written = slice(first, first + NUM_NEW)
        logits, texts.caches = decode(texts.model, new[:, written], texts.caches, parents, start)
        assert_same(logits, texts.logits_alone(new, [paths[written]] * 3))
    chosen = [paths[-1 - rng.integers(NUM_NEW)] for _ in range(3)]
    texts.caches = keep(texts.caches, np.array(chosen), start, np.full(3, num_tokens))
    texts.extend(new, chosen)
    new = rng.integers(0, 64, (3, 1))
    assert_same(decode(texts.model, new, texts.caches)[0], texts.logits_alone(new, [[[0]]] * 3))


def test_a_tree_that_doesnt_fit_is_refused(rng):
    texts = Texts(rng, tree_size=NUM_NEW)
    for tree, message in (
        ([-1, 0], "tree must be a TokenTree, got list"),
        (TokenTree.of_parents([-1], [1, 1, 1]), "a tree of 3 sequences, and of at least the 2 new tokens of each"),
    ):
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(lambda tree=tree: texts.model.decode(jnp.zeros((3, 2), int), texts.caches, tree=tree))
