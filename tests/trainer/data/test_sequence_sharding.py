"""Sequences sharded over devices: `token_order` puts every array back, padding is level, the stream stays the same."""

import dataclasses

import jax
import numpy as np
import pytest

from kernels import CausalMask, LocalMask, MultiHeadMask, ScheduledWindow
from kernels.context import chunk_costs, imbalance, shard_sequence
from layers import GPTConfig, LayerOverride
from trainer.config import CompilationConfig, ContextConfig, DataConfig, EvaluationConfig, MeshConfig, TrainConfig
from trainer.data import BatchShare, SequenceSharder, make_batches
from trainer.loop.evaluator import evaluate
from trainer.train import prepare

T = 96
MASKS = (CausalMask() & LocalMask(15, 0), CausalMask(), CausalMask() & LocalMask(15, 0))


@pytest.fixture
def config() -> TrainConfig:
    model = GPTConfig(vocab_size=260, num_layers=5, width=16, num_heads=2, num_kv_heads=2, head_dim=8, masks=MASKS)
    sizes = {"num_steps": 200, "sequence_length": T, "batch_size": 4, "gradient_accumulation": 2}
    return TrainConfig(
        "sharded", model, mesh=MeshConfig(context=4), evaluation=EvaluationConfig(num_sequences=5), **sizes
    )


@pytest.fixture
def open_batches(config, corpus):
    """The stream and the validation batches of a sharding; streams are closed when the test ends."""
    streams = []

    def make(sequence_sharding, config=config, **options):
        stream, validation, _ = make_batches(config, corpus, sequence_sharding, lambda line: None, **options)
        streams.append(stream)
        return stream, validation

    yield make
    for stream in streams:
        stream.close()


def put_back(share: BatchShare) -> dict[str, np.ndarray]:
    """The arrays with every token at its place."""
    token_order = share.arrays["token_order"]
    unsharded = {name: np.zeros_like(array) for name, array in share.arrays.items() if name != "token_order"}
    for name, array in unsharded.items():
        np.put_along_axis(array, token_order, share.arrays[name], axis=1)
    return unsharded


@pytest.mark.parametrize("keep_documents_apart", [True, False])
@pytest.mark.parametrize("sequence_sharding", ["zigzag", "balanced"])
def test_the_token_order_puts_every_batch_back(sequence_sharding, keep_documents_apart, config, open_batches):
    config = dataclasses.replace(config, data=DataConfig(keep_documents_apart=keep_documents_apart))
    unsharded, unsharded_validation = open_batches("contiguous", config)
    sharded, sharded_validation = open_batches(sequence_sharding, config)
    pairs = [(next(unsharded), next(sharded)) for _ in range(30)]
    for before, after in [*pairs, *zip(unsharded_validation, sharded_validation, strict=True)]:
        assert "token_order" not in before.arrays
        assert after.arrays["token_order"].dtype == np.int32
        found = put_back(after)
        assert found.keys() == before.arrays.keys()
        for name, array in before.arrays.items():
            assert found[name].dtype == array.dtype
            np.testing.assert_array_equal(found[name], array)
        for ours, theirs in zip(after.document_lengths, before.document_lengths, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    every_row = np.concatenate([after.arrays["token_order"] for _, after in pairs])
    documents_decide = sequence_sharding == "balanced" and keep_documents_apart
    assert (len(np.unique(every_row, axis=0)) > 1) is documents_decide
    # The last validation batch is filled up with padding.
    assert not sharded_validation[-1].arrays["weights"][1:].any()


def test_a_run_goes_on_with_another_sharding_and_another_batch(config, open_batches):
    """The place in the stream counts sequences, so nothing of it depends on how they were sharded."""
    straight, _ = open_batches("contiguous")
    batches = [next(straight).arrays for _ in range(12)]
    stream, _ = open_batches("balanced")
    for _ in range(3):
        next(stream)
    for sequence_sharding, batch_size, context, expected in (
        ("zigzag", 2, 2, batches[3]["tokens"][:2]),
        ("balanced", 2, 8, batches[3]["tokens"][2:]),
        ("contiguous", 8, 1, np.concatenate([batches[4]["tokens"], batches[5]["tokens"]])),
    ):
        state = stream.get_state()
        changed = dataclasses.replace(
            config, batch_size=batch_size, gradient_accumulation=1, mesh=MeshConfig(context=context)
        )
        stream, _ = open_batches(sequence_sharding, changed)
        assert stream.set_state(state) == []
        assert stream.get_state() == state
        share = next(stream)
        tokens = share.arrays["tokens"] if sequence_sharding == "contiguous" else put_back(share)["tokens"]
        np.testing.assert_array_equal(tokens, expected)


def test_each_process_shards_its_rows_as_one_process_does(open_batches):
    whole, validation = open_batches("balanced")
    mine, my_validation = open_batches("balanced", indices_of=lambda batch_size: range(1, batch_size, 2))
    pairs = [(next(whole), next(mine)) for _ in range(10)]
    for batch, share in [*pairs, *zip(validation, my_validation, strict=True)]:
        for name, array in batch.arrays.items():
            np.testing.assert_array_equal(share.arrays[name], array[1::2])


def test_the_models_masks_weigh_as_many_layers_as_have_them(config, rng):
    near, far = MASKS[:2]
    sharder = SequenceSharder.of(config, "balanced")
    assert sharder.masks == {near: 3, far: 2}
    ids = np.sort(rng.integers(1, 4, T)).astype(np.int32)
    positions = np.arange(T, dtype=np.int32) - np.searchsorted(ids, ids).astype(np.int32)
    documents = {"segment_ids": ids, "positions": positions}
    expected = shard_sequence("balanced", T, 4, masks={near: 3.0, far: 2.0}, **documents)
    np.testing.assert_array_equal(sharder(documents)["token_order"], expected)
    scheduled = dataclasses.replace(config.model, masks=(ScheduledWindow(2, 16, 10), far, near))
    scheduled = SequenceSharder.of(dataclasses.replace(config, model=scheduled), "balanced")
    np.testing.assert_array_equal(scheduled(documents)["token_order"], expected, "the widest window counts")
    overrides = (LayerOverride(), LayerOverride(head_dim=32), LayerOverride())
    wide = dataclasses.replace(config.model, layer_overrides=overrides)
    assert SequenceSharder.of(dataclasses.replace(config, model=wide), "balanced").masks == {near: 3, far: 8}
    heads = MultiHeadMask([near, far])
    by_heads = dataclasses.replace(config, model=dataclasses.replace(config.model, masks=(heads,)))
    expected = shard_sequence("balanced", T, 4, masks={near: 2.5, far: 2.5}, **documents)
    np.testing.assert_array_equal(SequenceSharder.of(by_heads, "balanced")(documents)["token_order"], expected)


@pytest.mark.parametrize("num_padded", [0, 3000, 16_384])
def test_padding_counts_as_what_it_costs(num_padded, rng):
    """Kernels attend within padding as within a document, though all its positions are 0."""
    length, num_ranks, masks = 16_384, 4, {CausalMask(): 1.0, CausalMask() & LocalMask(1000, 0): 2.0}
    ends = np.sort(rng.choice(np.arange(1, length), 20, replace=False))
    ids = np.searchsorted(ends, np.arange(length), side="right").astype(np.int32) + 1
    ids[length - num_padded :] = 0
    starts = np.flatnonzero(np.diff(ids, prepend=-1))
    positions = np.arange(length) - np.repeat(starts, np.diff(starts, append=length))
    sequence = {"segment_ids": ids, "positions": np.where(ids == 0, 0, positions)}
    sharder = SequenceSharder("balanced", length, num_ranks, masks, keep_documents_apart=True)
    token_order = sharder(sequence)["token_order"]
    costs = chunk_costs(masks, length, 128, segment_ids=ids, positions=positions)
    assert imbalance(costs[token_order[::128] // 128].reshape(num_ranks, -1)) <= 1.03


def test_a_length_that_cannot_be_sharded_is_refused():
    with pytest.raises(ValueError, match="a sequence of 36 tokens is not a multiple of twice 4 ranks"):
        SequenceSharder("zigzag", 36, 4, {}, True)


@pytest.mark.usefixtures("eight_devices")
def test_sharded_batches_over_eight_devices_have_the_loss_of_one_device(tmp_path, random_texts):
    """Validation batches, the last of them filled up with padding, and batches of the stream."""
    for number, text in enumerate(random_texts(30)):
        (tmp_path / f"{number}.txt").write_text(text)
    sizes = {"num_layers": 2, "width": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "mlp_width": 32}
    how = {"implementation": "reference", "compute_dtype": "float32", "remat": "none"}
    model = GPTConfig(260, masks=(CausalMask() & LocalMask(31, 0), CausalMask()), **sizes, **how)
    data = {"files": (f"{tmp_path}/*.txt",), "validation_fraction": 0.3, "token_cache_dir": f"{tmp_path}/tokens"}
    parts = {"data": DataConfig(source="text", **data), "compilation": CompilationConfig(cache_dir="")}
    parts["evaluation"] = EvaluationConfig(num_sequences=3)  # fills one batch and half of another
    base = TrainConfig("sharded", model, num_steps=200, sequence_length=128, batch_size=2, **parts)
    params = None

    def evaluate_on(mesh, sequence_sharding=None):
        nonlocal params
        context = ContextConfig(sequence_sharding=sequence_sharding)
        [setup] = prepare(dataclasses.replace(base, mesh=mesh, context=context), lambda line: None)
        params = jax.device_get(setup.functions.init_state().params) if params is None else params
        placed = jax.device_put(params, setup.functions.state_shardings.params)
        training = [setup.put(next(setup.batches)) for _ in range(3)]
        setup.batches.close()
        assert ("token_order" in training[0]) == (sequence_sharding is not None)
        each = (setup.validation_batches, training)
        eval_step = setup.functions.eval_step
        return [evaluate(lambda *given: eval_step(*given, 0), placed, batches, None) for batches in each]

    whole = evaluate_on(MeshConfig())
    for mesh, sequence_sharding in (
        (MeshConfig(data=2, context=4), "zigzag"),
        (MeshConfig(fsdp=2, context=4), "balanced"),
    ):
        for found, expected in zip(evaluate_on(mesh, sequence_sharding), whole, strict=True):
            assert found.num_targets == expected.num_targets > 0
            assert found.nats_per_token == pytest.approx(expected.nats_per_token, rel=1e-5)
