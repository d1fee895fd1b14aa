"""The losses of each token of several texts are those of logits written anew, on one device and on a mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import CausalMask, LocalMask
from layers import GPTConfig
from tests.layers.decoder_oracle import decoder_logits
from trainer.config import ContextConfig, DataConfig, LossConfig, MeshConfig, TrainConfig
from trainer.evaluate import teacher_forced
from trainer.evaluate.forward import TokenForward
from trainer.evaluate.tasks import Example, Question
from trainer.step.loss import token_losses
from trainer.step.sharding import make_mesh

MODEL = GPTConfig(
    vocab_size=64,
    num_layers=2,
    width=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp_width=32,
    masks=(CausalMask() & LocalMask(20, 0), CausalMask()),
    implementation="reference",
    compute_dtype="float32",
    final_logits_soft_cap=3.0,
)
# A run that doesn't keep documents apart, and accumulates: neither matters to texts that are evaluated.
CONFIG = TrainConfig(
    name="evaluated",
    model=MODEL,
    num_steps=200,
    sequence_length=32,
    batch_size=8,
    gradient_accumulation=2,
    data=DataConfig(keep_documents_apart=False),
    loss=LossConfig(chunk_size=40),
)
LENGTH = 200


def make_forward(mesh_config=None, sequence_sharding=None):
    context = ContextConfig(sequence_sharding=sequence_sharding)
    config = dataclasses.replace(CONFIG, mesh=mesh_config or MeshConfig(), context=context)
    return TokenForward(config, make_mesh(config.mesh), LENGTH)


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(5)
    return jax.tree.map(lambda leaf: rng.normal(0, 0.5, leaf.shape).astype(np.float32), make_forward().abstract_params)


def put(params, forward):
    return jax.device_put(params, jax.tree.map(lambda leaf: leaf.sharding, forward.abstract_params))


def check(found, stream, params):
    logits = decoder_logits(MODEL, params, stream[:-1])
    log_partition = np.log(np.exp(logits).sum(-1))
    np.testing.assert_allclose(found.nats, log_partition - logits[np.arange(len(stream) - 1), stream[1:]], rtol=2e-4)
    np.testing.assert_array_equal(found.is_likeliest, logits.argmax(-1) == stream[1:])


@pytest.mark.usefixtures("eight_devices")
@pytest.mark.parametrize(
    ("mesh", "sequence_sharding"),
    [
        (MeshConfig(), None),
        (MeshConfig(data=2, context=2, tensor=2), "zigzag"),
        (MeshConfig(fsdp=2, context=4), "balanced"),
    ],
    ids=str,
)
def test_losses_of_texts_are_those_of_logits_written_anew(mesh, sequence_sharding, params, rng):
    forward = make_forward(mesh, sequence_sharding)
    lengths = [LENGTH, 1, 90, LENGTH, 17, 130, 64]
    streams = [rng.integers(0, 64, length + 1).astype(np.int32) for length in lengths]
    # Some tokens must be the likeliest ones.
    for stream in streams:
        for index in range(min(len(stream) - 1, 12)):
            stream[index + 1] = decoder_logits(MODEL, params, stream[: index + 1])[-1].argmax()
    found = forward(put(params, forward), streams)
    assert [len(each.nats) for each in found] == lengths
    for each, stream in zip(found, streams, strict=True):
        check(each, stream, params)


def test_no_texts_have_no_losses(params):
    assert make_forward()(params, []) == []


def test_equal_logits_are_no_answer():
    """A model that says nothing would otherwise be right everywhere."""
    losses = token_losses(jnp.zeros((1, 5, 8)), jnp.zeros((8, 4)), jnp.array([[0, 1, 2, 3, 0]]), chunk_size=2)
    assert losses.is_likeliest.tolist() == [[True, False, False, False, True]]
    np.testing.assert_allclose(losses.nats, np.log(4), rtol=1e-6)


def test_an_answer_counts_if_each_of_its_tokens_is_the_likeliest(params, rng):
    forward = make_forward()
    placed = put(params, forward)

    def greedy(tokens, count):
        for _ in range(count):
            tokens = [*tokens, int(decoder_logits(MODEL, params, np.array(tokens))[-1].argmax())]
        return tokens[-count:]

    examples, expected = [], []
    for number_right in (2, 0, 1):
        context, questions, are_right = rng.integers(0, 64, 60).astype(np.int32), [], []
        for number in range(3):
            prompt = rng.integers(0, 64, 5).astype(np.int32)
            answer = np.array(greedy([*context, *prompt], 4), np.int32)
            if number >= number_right:
                answer[number] = (answer[number] + 1) % 64  # one wrong token, the first or a later one
            questions.append(Question(prompt, answer, "?"))
            are_right.append(number < number_right)
        examples.append(Example("planted", LENGTH, 0.5, context, tuple(questions)))
        expected.append(are_right)
    assert [each.tolist() for each in teacher_forced.score(forward, placed, examples)] == expected
