"""Sequences dealt out to devices: `places` puts every array back, padding is level too, the stream stays the same."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from kernels import CausalMask, LocalMask, MultiHeadMask
from kernels.context import chunk_costs, deal_tokens, imbalance
from layers import GPTConfig, LayerOverride
from trainer.config import CompilationConfig, ContextConfig, DataConfig, EvaluationConfig, MeshConfig, TrainConfig
from trainer.data import BatchShare, Dealer, make_batches
from trainer.loop.evaluator import evaluate
from trainer.train import prepare

T = 64
MASKS = (CausalMask() & LocalMask(15, 0), CausalMask(), CausalMask() & LocalMask(15, 0))


@pytest.fixture
def config() -> TrainConfig:
    model = GPTConfig(vocab_size=260, num_layers=5, width=16, num_heads=2, num_kv_heads=2, head_dim=8, masks=MASKS)
    return TrainConfig(
        "dealt",
        model,
        num_steps=200,
        sequence_length=T,
        batch_size=4,
        gradient_accumulation=2,
        mesh=MeshConfig(context=4),
        evaluation=EvaluationConfig(num_sequences=5),
    )


@pytest.fixture
def open_batches(config, corpus):
    """The stream and the validation batches of a deal; streams are closed when the test ends."""
    streams = []

    def make(deal, config=config, **options):
        stream, validation, _ = make_batches(config, corpus, deal, lambda line: None, **options)
        streams.append(stream)
        return stream, validation

    yield make
    for stream in streams:
        stream.close()


def put_back(share: BatchShare) -> dict[str, np.ndarray]:
    """The arrays with every token at its place."""
    places = share.arrays["places"]
    undealt = {name: np.zeros_like(array) for name, array in share.arrays.items() if name != "places"}
    for name, array in undealt.items():
        np.put_along_axis(array, places, share.arrays[name], axis=1)
    return undealt


@pytest.mark.parametrize("keep_documents_apart", [True, False])
@pytest.mark.parametrize("deal", ["zigzag", "by_cost"])
def test_places_put_every_batch_back(deal, keep_documents_apart, config, open_batches):
    config = dataclasses.replace(config, data=DataConfig(keep_documents_apart=keep_documents_apart))
    undealt, undealt_validation = open_batches("in_order", config)
    dealt, dealt_validation = open_batches(deal, config)
    pairs = [(next(undealt), next(dealt)) for _ in range(30)]
    for before, after in [*pairs, *zip(undealt_validation, dealt_validation, strict=True)]:
        assert "places" not in before.arrays
        assert after.arrays["places"].dtype == np.int32
        found = put_back(after)
        assert found.keys() == before.arrays.keys()
        for name, array in before.arrays.items():
            assert found[name].dtype == array.dtype
            np.testing.assert_array_equal(found[name], array)
        for ours, theirs in zip(after.document_lengths, before.document_lengths, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    every_row = np.concatenate([after.arrays["places"] for _, after in pairs])
    documents_decide = deal == "by_cost" and keep_documents_apart
    assert (len(np.unique(every_row, axis=0)) > 1) is documents_decide
    # The last validation batch is filled up with padding.
    assert not dealt_validation[-1].arrays["target_mask"][1:].any()


def test_a_run_goes_on_with_another_deal_and_another_batch(config, open_batches):
    """The place in the stream counts sequences, so nothing of it depends on how they were dealt out."""
    straight, _ = open_batches("in_order")
    batches = [next(straight).arrays for _ in range(12)]
    stream, _ = open_batches("by_cost")
    for _ in range(3):
        next(stream)
    for deal, batch_size, context, expected in (
        ("zigzag", 2, 2, batches[3]["tokens"][:2]),
        ("by_cost", 2, 8, batches[3]["tokens"][2:]),
        ("in_order", 8, 1, np.concatenate([batches[4]["tokens"], batches[5]["tokens"]])),
    ):
        state = stream.get_state()
        changed = dataclasses.replace(
            config, batch_size=batch_size, gradient_accumulation=1, mesh=MeshConfig(context=context)
        )
        stream, _ = open_batches(deal, changed)
        assert stream.set_state(state) == []
        assert stream.get_state() == state
        share = next(stream)
        tokens = share.arrays["tokens"] if deal == "in_order" else put_back(share)["tokens"]
        np.testing.assert_array_equal(tokens, expected)


def test_each_process_deals_its_rows_as_one_process_does(open_batches):
    whole, validation = open_batches("by_cost")
    mine, my_validation = open_batches("by_cost", rows_of=lambda batch_size: range(1, batch_size, 2))
    pairs = [(next(whole), next(mine)) for _ in range(10)]
    for batch, share in [*pairs, *zip(validation, my_validation, strict=True)]:
        for name, array in batch.arrays.items():
            np.testing.assert_array_equal(share.arrays[name], array[1::2])


def test_the_models_masks_weigh_as_many_layers_as_have_them(config, rng):
    near, far = MASKS[:2]
    dealer = Dealer.of(config, "by_cost")
    assert dealer.masks == {near: 3, far: 2}
    ids = np.sort(rng.integers(1, 4, T)).astype(np.int32)
    positions = np.arange(T, dtype=np.int32) - np.searchsorted(ids, ids).astype(np.int32)
    sequence = {"segment_ids": ids, "positions": positions}
    documents = {"segment_ids": ids, "positions": positions}
    expected = deal_tokens("by_cost", T, 4, masks={near: 3.0, far: 2.0}, **documents)
    np.testing.assert_array_equal(dealer(sequence)["places"], expected)
    wide = dataclasses.replace(
        config.model, layer_overrides=(LayerOverride(), LayerOverride(head_dim=32), LayerOverride())
    )
    assert Dealer.of(dataclasses.replace(config, model=wide), "by_cost").masks == {near: 3, far: 8}
    heads = MultiHeadMask([near, far])
    by_heads = dataclasses.replace(config, model=dataclasses.replace(config.model, masks=(heads,)))
    expected = deal_tokens("by_cost", T, 4, masks={near: 2.5, far: 2.5}, **documents)
    np.testing.assert_array_equal(Dealer.of(by_heads, "by_cost")(sequence)["places"], expected)


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
    places = Dealer("by_cost", length, num_ranks, masks, keep_documents_apart=True)(sequence)["places"]
    costs = chunk_costs(masks, length, 128, segment_ids=ids, positions=positions)
    assert imbalance(costs[places[::128] // 128].reshape(num_ranks, -1)) <= 1.03


def test_a_length_that_cannot_be_dealt_out_is_refused():
    with pytest.raises(ValueError, match="a row of 36 tokens is not a multiple of twice 4 ranks"):
        Dealer("zigzag", 36, 4, {}, True)


@pytest.mark.usefixtures("eight_devices")
def test_dealt_batches_over_eight_devices_have_the_loss_of_one_device(tmp_path, random_texts):
    """Validation batches, the last of them filled up with padding, and batches of the stream."""
    for number, text in enumerate(random_texts(30)):
        (tmp_path / f"{number}.txt").write_text(text)
    model = GPTConfig(
        vocab_size=260,
        num_layers=2,
        width=16,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        mlp_width=32,
        masks=(CausalMask() & LocalMask(31, 0), CausalMask()),
        implementation="reference",
        compute_dtype="float32",
        remat="none",
    )
    data = {"files": (f"{tmp_path}/*.txt",), "validation_fraction": 0.3, "token_cache_dir": f"{tmp_path}/tokens"}
    base = TrainConfig(
        "dealt",
        model,
        num_steps=200,
        sequence_length=128,
        batch_size=2,
        data=DataConfig(source="text", **data),
        evaluation=EvaluationConfig(num_sequences=3),  # fills one batch and half of another
        compilation=CompilationConfig(cache_dir=""),
    )
    params = None

    def evaluate_on(mesh, deal=None):
        nonlocal params
        setup = prepare(dataclasses.replace(base, mesh=mesh, context=ContextConfig(deal=deal)), lambda line: None)
        params = jax.device_get(setup.functions.init_state().params) if params is None else params
        placed = jax.device_put(params, setup.functions.state_shardings.params)
        training = [setup.put(next(setup.batches)) for _ in range(3)]
        setup.batches.close()
        assert ("places" in training[0]) == (deal is not None)
        return [
            evaluate(setup.functions.eval_step, placed, batches, None)
            for batches in (setup.validation_batches, training)
        ]

    whole = evaluate_on(MeshConfig())
    for mesh, deal in ((MeshConfig(data=2, context=4), "zigzag"), (MeshConfig(fsdp=2, context=4), "by_cost")):
        for found, expected in zip(evaluate_on(mesh, deal), whole, strict=True):
            assert found.num_targets == expected.num_targets > 0
            assert found.nats_per_token == pytest.approx(expected.nats_per_token, rel=1e-5)
