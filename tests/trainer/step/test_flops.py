"""FLOPs against counting every pair of a dense mask, and the table of peaks."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx

from kernels import CausalMask, ChunkedCausalMask, FullMask, LocalMask, MultiHeadMask, PrefixMask, ScheduledWindow
from layers import GPT, GPTConfig, LayerOverride, LoRAConfig, MoEConfig
from layers.lora import adapted_shapes
from trainer.step.flops import FlopCounter, num_matmul_parameters, peak_flops_per_s
from trainer.step.sharding import path_name

CONFIG = GPTConfig(vocab_size=48, num_layers=5, width=16, num_heads=4, num_kv_heads=2, head_dim=8, mlp_width=24)


def random_segment_ids(rng, batch_size=3, length=40):
    """Documents 1, 2, … and then padding, in each row."""
    ids = np.zeros((batch_size, length), np.int32)
    for row in ids:
        ends = np.sort(rng.choice(np.arange(1, length + 1), size=rng.integers(1, 6), replace=False))
        for document, (start, stop) in enumerate(zip([0, *ends], ends, strict=False), start=1):
            row[start:stop] = document
    return ids


def count_densely(mask, num_heads, segment_ids) -> int:
    """Allowed pairs of one layer, over heads: the mask in document positions, within documents."""
    pairs = 0
    for row in segment_ids:
        positions = np.concatenate([np.arange(np.sum(row == i)) for i in range(1, row.max() + 1)])
        documents = row[row != 0]
        same_document = documents[:, None] == documents[None, :]
        masks = mask.masks if isinstance(mask, MultiHeadMask) else (mask,) * num_heads
        pairs += sum(np.sum(m(positions[:, None], positions[None, :]) & same_document) for m in masks)
    return int(pairs)


def test_documents_that_are_not_kept_apart_are_one(rng):
    segment_ids = random_segment_ids(rng)
    together = FlopCounter(CONFIG, segment_ids.shape[1], keep_documents_apart=False)(segment_ids)
    assert together == FlopCounter(CONFIG, segment_ids.shape[1])(np.minimum(segment_ids, 1))


@pytest.mark.parametrize(
    "masks",
    [
        (CausalMask(),),
        (CausalMask() & LocalMask(5, 0), CausalMask() & LocalMask(5, 0), CausalMask()),
        (ChunkedCausalMask(7), CausalMask(-1)),
        (PrefixMask(6), FullMask()),
        (CausalMask() | PrefixMask(9), CausalMask() & PrefixMask(11)),
        (LocalMask(3, 4), ~CausalMask()),
        (LocalMask(2**31 - 1, 0), CausalMask(2**40), ChunkedCausalMask(10**30)),
        (PrefixMask(2**31), CausalMask(-(2**31))),
        (MultiHeadMask([CausalMask(), CausalMask(), LocalMask(2, 0), FullMask()]),),
    ],
    ids=repr,
)
def test_matches_a_dense_count(rng, masks):
    config = dataclasses.replace(CONFIG, masks=masks)
    segment_ids = random_segment_ids(rng)
    pairs = sum(count_densely(masks[layer % len(masks)], 4, segment_ids) for layer in range(5))
    counter = FlopCounter(config, segment_ids.shape[1])
    expected = 6 * num_matmul_parameters(config) * np.sum(segment_ids != 0) + 12 * 8 * pairs
    assert counter(segment_ids).causal == expected
    assert counter(segment_ids).causal == expected  # again, from what it remembers


def test_a_scheduled_window_counts_by_its_width(rng):
    segment_ids, others = random_segment_ids(rng), (CausalMask(), CausalMask() | PrefixMask(9))
    counter = FlopCounter(dataclasses.replace(CONFIG, masks=(ScheduledWindow(2, 20, 5), *others)), segment_ids.shape[1])
    for step, width in ((1, 2), (3, 11), (7, 20)):
        static = dataclasses.replace(CONFIG, masks=(LocalMask(width - 1, 0), *others))
        assert counter(segment_ids, step) == FlopCounter(static, segment_ids.shape[1])(segment_ids)


def test_noncausal_ignores_masks_documents_and_padding(rng):
    segment_ids = random_segment_ids(rng)
    batch_size, length = segment_ids.shape
    expected = 6 * num_matmul_parameters(CONFIG) * batch_size * length + 12 * 4 * 8 * 5 * batch_size * length**2
    assert FlopCounter(CONFIG, length)(segment_ids).noncausal == expected


def test_documents_next_to_each_other_in_a_batch_stay_apart():
    # The first row ends and the second begins with document 1.
    two_rows = FlopCounter(CONFIG, 8)(np.ones((2, 8), np.int32)).causal
    assert two_rows == 2 * FlopCounter(CONFIG, 8)(np.ones((1, 8), np.int32)).causal


@pytest.mark.parametrize("mlp", ["gelu", "swiglu", "geglu", "clamped_swiglu"])
@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_matmul_parameters_are_the_model_s_kernels(mlp, tie_embeddings):
    config = dataclasses.replace(CONFIG, mlp=mlp, tie_embeddings=tie_embeddings, qk_norm="per_head", sinks=True)
    params = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))), nnx.Param))
    sizes = {path_name(path): leaf.size for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]}
    kernels = sum(size for name, size in sizes.items() if name.endswith("kernel"))
    assert num_matmul_parameters(config) == kernels + (sizes["embedding.embedding"] if tie_embeddings else 0)


def test_layers_count_with_their_own_heads():
    """A sum over models of one layer each: their head counts and head dims differ, and two of them share a mask."""
    window, sizes = CausalMask() & LocalMask(3, 0), dataclasses.replace(CONFIG, num_layers=1, vocab_size=1)
    layers = [(CausalMask(), 2, 8), (window, 4, 16), (CausalMask(), 1, 4)]
    config = dataclasses.replace(
        sizes,
        num_layers=3,
        masks=tuple(mask for mask, _, _ in layers),
        layer_overrides=tuple(LayerOverride(num_kv_heads=num, head_dim=dim) for _, num, dim in layers),
    )
    each = (dataclasses.replace(sizes, masks=(mask,), num_kv_heads=num, head_dim=dim) for mask, num, dim in layers)
    alone = [FlopCounter(config_of_one, 16) for config_of_one in each]
    segment_ids = np.repeat([[1, 2, 3]], [5, 9, 2], axis=1)
    head = 6 * config.width * config.vocab_size * 16  # which each of the three models has
    counted = FlopCounter(config, 16)(segment_ids)
    for kind in ("causal", "noncausal"):
        assert getattr(counted, kind) == sum(getattr(each(segment_ids), kind) for each in alone) - 2 * head


def test_of_a_mixture_only_a_tokens_own_experts_count():
    mixture = MoEConfig(num_experts=8, num_experts_per_token=3, expert_width=5)
    dense = num_matmul_parameters(dataclasses.replace(CONFIG, mlp="swiglu", mlp_width=3 * 5))
    routers = CONFIG.num_layers * CONFIG.width * 8
    assert num_matmul_parameters(dataclasses.replace(CONFIG, mlp="swiglu", moe=mixture)) == dense + routers


@pytest.mark.parametrize("keep_documents_apart", [True, False])
def test_lengths_of_documents_tell_what_segment_ids_tell(keep_documents_apart, rng):
    segment_ids = random_segment_ids(rng)
    segment_ids[1] = 0  # a sequence of padding
    lengths = [np.bincount(row)[1:] for row in segment_ids]
    masks = (CausalMask(), PrefixMask(7) | CausalMask())
    config = dataclasses.replace(CONFIG, masks=masks)
    counter = FlopCounter(config, segment_ids.shape[1], keep_documents_apart=keep_documents_apart)
    assert counter.of_documents(lengths) == counter(segment_ids)
    # So they do for tokens that have been sharded, whose ids are no runs any more.
    sharded = rng.permuted(segment_ids, axis=1)
    assert counter.of_documents([np.bincount(row)[1:] for row in sharded]) == counter(segment_ids)
    nothing = counter.of_documents([np.zeros(0, np.int64)] * 2)
    assert nothing == counter(np.zeros((2, segment_ids.shape[1]), np.int32))
    assert nothing.causal == 0


@pytest.mark.parametrize(
    ("teraflops", "device_kinds"),
    [
        (989, ["NVIDIA H200", "NVIDIA H100 80GB HBM3"]),
        (756, ["NVIDIA H100 PCIe"]),
        (835, ["NVIDIA H100 NVL"]),
        (312, ["NVIDIA A100-SXM4-80GB"]),
        (121, ["NVIDIA L4"]),
        (362, ["NVIDIA L40S"]),
        (275, ["TPU v4"]),
        (197, ["TPU v5 lite"]),
        (459, ["TPU v5", "TPU v5p"]),
        (918, ["TPU v6 lite"]),
        # No vendor tells these.
        (None, ["NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA L40", "TPU v4 lite", "cpu"]),
    ],
)
def test_peaks_are_those_that_vendors_tell(teraflops, device_kinds):
    for kind in device_kinds:
        expected = None if teraflops is None else teraflops * 1e12
        assert peak_flops_per_s(SimpleNamespace(device_kind=kind), "bfloat16") == expected, kind


def test_the_table_is_for_bfloat16_alone():
    assert peak_flops_per_s(SimpleNamespace(device_kind="NVIDIA H200"), "float32") is None


@pytest.mark.parametrize("embeddings", [False, True])
@pytest.mark.parametrize("moe", [None, MoEConfig(4, 3, 20)])
def test_frozen_matrices_have_no_gradient_and_adapters_count(moe, embeddings):
    """By the shapes of the parameters themselves."""
    config = dataclasses.replace(CONFIG, moe=moe)
    lora = LoRAConfig(rank=3, targets=("*.query", "*.down"), embeddings=embeddings)
    trained = frozen = 0
    for path, leaf in jax.tree_util.tree_flatten_with_path(adapted_shapes(config, lora))[0]:
        name = path_name(path)
        size = leaf.size * 3 // 4 if ".experts." in name else leaf.size
        if lora.trains(name) and not name.endswith("scale"):
            trained += size
        elif not name.endswith("scale"):
            frozen += size
    documents, ones = [np.array([8])], FlopCounter(config, 8, lora=lora)
    dense = FlopCounter(config, 8)
    difference = ones.of_documents(documents).causal - dense.of_documents(documents).causal
    assert difference == 8 * (6 * trained + 4 * frozen - 6 * num_matmul_parameters(config))
