"""TrainConfig refuses, before any device starts, what can't be trained."""

import dataclasses
import json
import math
import operator
from typing import get_args, get_origin, get_type_hints

import jax
import numpy as np
import pytest

import kernels
from kernels import CausalMask, LocalMask, MultiHeadMask
from layers import GPTConfig, LayerOverride, LoRAConfig, MoEConfig, RopeScaling
from layers.lora import adapted_shapes
from trainer.config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    LossConfig,
    MeshConfig,
    OptimizerConfig,
    SamplesConfig,
    TensorConfig,
    TrainConfig,
    WatchdogConfig,
)
from trainer.config.file import config_from_json, config_to_json
from trainer.errors import UserMistake
from trainer.step.sharding import PARTITION_RULES, axes_of, partition_spec, path_name

# No two dims of a parameter have the same length, so that a length tells which field it comes from.
SIZES = {"vocab_size": 22, "num_layers": 5, "width": 14, "num_heads": 12, "num_kv_heads": 6, "head_dim": 4}
BIASES = {"mlp_bias": True, "attention_bias": True, "output_bias": True}
NORMS = {"qk_norm": "per_head", "norm_placement": "both"}
MODEL = GPTConfig(**SIZES, mlp_width=26, tie_embeddings=False, mlp="swiglu", sinks=True, **BIASES, **NORMS)
EXPERTS = MoEConfig(num_experts=7, num_experts_per_token=2, expert_width=34, router_bias=True, expert_bias=True)
MIXTURE = dataclasses.replace(MODEL, mlp_bias=False, moe=EXPERTS)
CONFIG = TrainConfig("test", MODEL, 20, sequence_length=64, batch_size=2, optimizer=OptimizerConfig(num_warmup_steps=2))
PER_HEAD = MultiHeadMask([CausalMask()] * 6 + [CausalMask() & LocalMask(7, 0)] * 6)


POSITIVE = "must be positive and finite"
NOT_NEGATIVE = "must be finite and not negative"


@pytest.mark.parametrize(
    ("cls", "change", "message"),
    [
        *((OptimizerConfig, {name: value}, rf"optimizer\.{name}={value} {POSITIVE}")
          for name in ("learning_rate", "epsilon", "clip_norm") for value in (0.0, -1.0, math.inf, math.nan)),
        *((OptimizerConfig, {name: value}, rf"optimizer\.{name}={value} must be at least 0 and less than 1")
          for name in ("beta1", "beta2") for value in (-0.1, 1.0, math.inf, math.nan)),
        *((OptimizerConfig, {"weight_decay": value}, rf"optimizer\.weight_decay={value} {NOT_NEGATIVE}")
          for value in (math.nan, math.inf)),
        *((LossConfig, {"z_loss": value}, rf"loss\.z_loss={value} {NOT_NEGATIVE}; 0 turns it off")
          for value in (math.nan, math.inf, -1.0)),
        (OptimizerConfig, {"num_warmup_steps": -1}, rf"optimizer\.num_warmup_steps=-1 {NOT_NEGATIVE}"),
        (OptimizerConfig, {"final_learning_rate_fraction": 1.1}, r"final_learning_rate_fraction=1.1 must lie between"),
        (OptimizerConfig, {"decay_fraction": math.nan}, r"optimizer\.decay_fraction=nan must lie between 0 and 1"),
        (OptimizerConfig, {"skip_grad_norm_above": 1.0}, r"optimizer\.skip_grad_norm_above=1.0 must be more than 1"),
        (OptimizerConfig, {"max_skipped_in_a_row": 0}, r"optimizer\.max_skipped_in_a_row=0 must be at least 1"),
        (LossConfig, {"chunk_size": 0}, r"loss\.chunk_size=0 must be at least 1"),
        (DataConfig, {"validation_fraction": 0.0}, r"data\.validation_fraction=0.0 must lie strictly between 0 and 1"),
        (DataConfig, {"validation_fraction": 1.0}, r"data\.validation_fraction=1.0 must lie strictly between 0 and 1"),
        (DataConfig, {"token_cache_gib": math.inf}, r"data\.token_cache_gib=inf must be at least 0 and finite"),
        (OptimizerConfig, {"momentum": 1.0}, r"optimizer\.momentum=1.0 must be at least 0 and less than 1"),
        (SamplesConfig, {"seed": -1}, r"samples\.seed=-1 must not be negative"),
        (LossConfig, {"implementation": "triton"}, r"loss\.implementation='triton' is not one of "),
        (TensorConfig, {"collectives": "nccl"}, r"tensor\.collectives='nccl' is not one of "),
        (WatchdogConfig, {"factor": 1.0}, r"watchdog\.factor=1.0 must be more than 1"),
        (WatchdogConfig, {"min_seconds": 0.0}, rf"watchdog\.min_seconds=0.0 {POSITIVE}; watchdog\.enabled"),
        (WatchdogConfig, {"first_seconds": math.inf}, rf"watchdog\.first_seconds=inf {POSITIVE}"),
    ],
)  # fmt: skip
def test_a_section_refuses(cls, change, message):
    with pytest.raises(ValueError, match=message):
        cls(**change)


@pytest.mark.parametrize(
    ("cls", "section", "names"),
    [
        (DataConfig, "data", ["num_prefetch_batches"]),
        (MeshConfig, "mesh", ["data", "fsdp", "tensor", "context"]),
        (EvaluationConfig, "evaluation", ["every_num_steps", "num_sequences"]),
        (SamplesConfig, "samples", ["num_tokens"]),
        (CheckpointConfig, "checkpoint", ["every_num_steps", "num_kept"]),
    ],
)
def test_counts_are_at_least_1(cls, section, names):
    for name in names:
        with pytest.raises(ValueError, match=rf"^{section}\.{name}=0 must be at least 1$"):
            cls(**{name: 0})
        assert getattr(cls(**{name: 1}), name) == 1


@pytest.mark.parametrize(
    "name", ["num_steps", "sequence_length", "batch_size", "gradient_accumulation", "log_every_num_steps"]
)
def test_a_run_has_at_least_1_of_each(name):
    with pytest.raises(ValueError, match=rf"^{name}=0 must be at least 1$"):
        dataclasses.replace(CONFIG, **{name: 0})


def test_the_edges_of_what_is_allowed():
    assert OptimizerConfig(beta1=0.0, beta2=0.0, weight_decay=0.0, num_warmup_steps=0).beta1 == 0.0
    assert LossConfig(z_loss=0.0).z_loss == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_steps": 1}, r"optimizer\.num_warmup_steps=2 leaves too few of num_steps=1 .*use at most 0 warm-up"),
        ({"num_steps": 2**31}, r"num_steps=2147483648 must be less than 2\*\*31"),
        (
            {"optimizer": OptimizerConfig(schedule="wsd", num_warmup_steps=17)},
            r"optimizer\.num_warmup_steps=17 leaves too few of num_steps=20 for the wsd decay; use at most 16",
        ),
        ({"seed": -1}, "seed=-1 must not be negative"),
        ({"model": dataclasses.replace(MODEL, param_dtype="bfloat16")}, r"param_dtype='bfloat16'.*set it to float32"),
        (
            {"model": dataclasses.replace(MODEL, masks=(CausalMask(), PER_HEAD)), "mesh": MeshConfig(tensor=2)},
            r"MultiHeadMask, whose heads mesh\.tensor=2 would split.*set mesh\.tensor to 1, or use one mask",
        ),
    ],
)
def test_settings_that_cannot_work_together_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


def test_a_mask_for_each_head_is_fine_on_whole_heads():
    masks = (CausalMask(), PER_HEAD)
    assert dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, masks=masks)).model.masks == masks


def splits_of_the_partition_rules() -> set[tuple[str, tuple[str, ...]]]:
    """(model field, mesh axes) of every dim that a rule lays on axes."""
    mesh = jax.sharding.AbstractMesh((1,) * 4, ("data", "fsdp", "tensor", "context"))
    fields = {getattr(MODEL, field.name): field.name for field in dataclasses.fields(MODEL) if field.type == "int"}
    fields[MIXTURE.moe.expert_width] = "moe.expert_width"
    splits, num_rules = set(), set()
    for model in (MODEL, MIXTURE):
        params = adapted_shapes(model, LoRAConfig(rank=1))
        for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
            spec = partition_spec(path_name(path), leaf.shape, mesh)
            lengths = zip(leaf.shape, spec, strict=True)
            splits |= {(fields[length], axes) for length, entry in lengths if (axes := axes_of(entry))}
            num_rules.add(spec)
    assert num_rules == {spec for _, spec in PARTITION_RULES}
    return splits


def test_refuses_exactly_what_the_partition_rules_cannot_split():
    splits = splits_of_the_partition_rules()
    assert {("width", ("fsdp", "context")), ("moe.expert_width", ("tensor",))} <= splits
    for axes in (("fsdp", "context"), ("tensor",)):
        for name in ("vocab_size", "width", "num_heads", "num_kv_heads", "head_dim", "mlp_width", "num_layers"):
            odd = {name: getattr(MODEL, name) // 2 | 1}
            if name == "num_heads":
                odd |= {"num_kv_heads": 1}
            elif name == "head_dim":
                odd |= {"rope_base": None}
            model = dataclasses.replace(MODEL, **odd)
            for axis in axes:
                if (name, axes) in splits:
                    product = " × ".join(rf"mesh\.{axis}" for axis in axes)
                    told = rf"model\.{name}=\d+ is not a multiple of {product} = 2; use "
                    with pytest.raises(ValueError, match=told):
                        dataclasses.replace(CONFIG, model=model, mesh=MeshConfig(**{axis: 2}))
                else:
                    dataclasses.replace(CONFIG, model=model, mesh=MeshConfig(**{axis: 2}))


def test_refuses_experts_that_tensor_cannot_split():
    config = dataclasses.replace(CONFIG, model=MIXTURE, mesh=MeshConfig(tensor=2))
    odd = dataclasses.replace(MIXTURE, moe=dataclasses.replace(MIXTURE.moe, expert_width=33))
    told = r"model\.moe\.expert_width=33 is not a multiple of mesh\.tensor = 2; use 34, "
    with pytest.raises(ValueError, match=told):
        dataclasses.replace(config, model=odd)
    # There is no other MLP whose width could matter.
    dataclasses.replace(config, model=dataclasses.replace(MIXTURE, mlp_width=25))


def test_the_width_divides_over_fsdp_and_context_together():
    for mesh in (MeshConfig(fsdp=2), MeshConfig(context=2)):
        dataclasses.replace(CONFIG, mesh=mesh)
    told = r"model\.width=14 is not a multiple of mesh\.fsdp × mesh\.context = 4; use 16, or make .* a divisor of 14"
    with pytest.raises(ValueError, match=told):
        dataclasses.replace(CONFIG, mesh=MeshConfig(fsdp=2, context=2))


WHOLE = [0, *(sign * size for sign in (1, -1) for size in (1, 2**31 - 1, 2**31, 2**32, 2**63, 10**30, 10**400))]
FRACTIONS = [-0.0, math.inf, -math.inf, math.nan, 1e-320, 1e-45, 1.1e-38, 3.5e38, -1e308, 0.99999999999]


def numbers(config):
    """The path of every number in a config, with the types that it may have."""
    for name, hint in get_type_hints(type(config)).items():
        if dataclasses.is_dataclass(getattr(config, name)):
            yield from ((f"{name}.{path}", types) for path, types in numbers(getattr(config, name)))
        elif get_origin(hint) is not tuple and {int, float} & (types := {hint, *get_args(hint)}):
            yield name, types


def replace_at(config, path, value):
    """The config with one value changed, or why it can't be."""
    name, _, rest = path.partition(".")
    if rest:
        value = replace_at(getattr(config, name), rest, value)
    try:
        return value if isinstance(value, ValueError) else dataclasses.replace(config, **{name: value})
    except ValueError as refused:
        return refused


@pytest.mark.parametrize(("path", "types"), [pytest.param(*number, id=number[0]) for number in numbers(CONFIG)])
def test_a_number_of_any_size_is_refused_or_fits_the_device(path, types):
    for value in WHOLE + (FRACTIONS if float in types else []):
        config = replace_at(CONFIG, path, value)
        if isinstance(config, ValueError):
            assert 0 < len(str(config)) < 1000
            continue
        kept = operator.attrgetter(path)(config)
        held = np.float32(kept) if float in types else np.array(kept).astype(np.int32)
        assert held == pytest.approx(kept, rel=1e-6), "as the device has it"
        assert path not in ("optimizer.beta1", "optimizer.beta2") or held < 1
        assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config


@pytest.mark.parametrize(
    "tuning",
    [
        kernels.BlockwiseTuning(16, 32),
        kernels.SplashTuning.square(256, backward="fused"),
        kernels.MosaicGpuTuning("split", kernels.MosaicForwardTuning(3, 64), kernels.MosaicBackwardTuning(3)),
        kernels.TritonTuning(query=kernels.TritonTiles(32, 64, num_warps=8)),
    ],
    ids=lambda tuning: type(tuning).__name__,
)
def test_a_tuning_object_is_saved_and_read_back(tuning):
    model = dataclasses.replace(CONFIG.model, implementation=tuning, decode_implementation=kernels.TritonDecodeTuning())
    saved = json.loads(json.dumps(config_to_json(dataclasses.replace(CONFIG, model=model))))
    assert config_from_json(saved).model == model
    assert saved["model"]["implementation"]["tuning"] == type(tuning).__name__
    del saved["model"]["decode_implementation"]
    assert config_from_json(saved).model.decode_implementation is None, "as configs of earlier versions have it"


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({"tuning": "SplashTunning"}, "tuning='SplashTunning' is not one of .*; did you mean SplashTuning?"),
        ({"block_q": 16}, "tuning=None is not one of BlockwiseTuning, SplashTuning"),
        ({"tuning": "BlockwiseTuning", "block_q": 16, "block_k": 16}, "this version knows no 'block_k'"),
        ({"tuning": "BlockwiseTuning", "block_q": 16}, "missing 1 required positional argument: 'block_kv'"),
        ({"tuning": "BlockwiseTuning", "block_q": 0, "block_kv": 1}, "block_q=0 and block_kv=1 must be at least 1"),
        ({"tuning": "BlockwiseTuning", "block_q": "x", "block_kv": 1}, "implementation.block_q='x' is of type str"),
        ({"tuning": "TritonDecodeTuning"}, "TritonDecodeTuning.* is no backend of attention"),
    ],
)
def test_a_saved_tuning_that_cannot_be_read_back_is_told(saved, message):
    config = config_to_json(CONFIG)
    config["model"]["implementation"] = saved
    with pytest.raises(UserMistake, match=message):
        config_from_json(config)


def test_what_layers_are_made_of_is_read_back():
    longrope = RopeScaling("longrope", 2.0, short_factors=(1.0, 1.5), long_factors=(1.0, 3.0))
    overrides = (LayerOverride(rope_base=None, num_kv_heads=4), LayerOverride(rope_scaling=longrope))
    yarn = RopeScaling("yarn", 4.0, attention_factor=1.2, truncate=False)
    model = dataclasses.replace(MIXTURE, layer_overrides=overrides, rope_scaling=yarn)
    config = dataclasses.replace(CONFIG, model=model)
    assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config
    saved = config_to_json(config)
    saved["model"]["layer_overrides"][0]["rope_base"] = "none"
    with pytest.raises(UserMistake, match=r"model\.layer_overrides\.rope_base='none' is of type str; expected .*float"):
        config_from_json(saved)


def test_a_layers_own_heads_divide_over_tensor():
    model = dataclasses.replace(MODEL, layer_overrides=(LayerOverride(), LayerOverride(num_kv_heads=3)))
    told = r"layer_overrides gives layer 1 num_kv_heads=3, which mesh.tensor = 2 does not divide; make"
    with pytest.raises(ValueError, match=told):
        dataclasses.replace(CONFIG, model=model, mesh=MeshConfig(tensor=2))


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "/tmp", "a\0b", "a\nb", "\x1b[31m", "\ud800", "x" * 256, "é" * 128]
)
def test_a_name_must_do_for_a_folder(name):
    with pytest.raises(ValueError, match=r"^name=.*folder's name"):
        dataclasses.replace(CONFIG, name=name)


@pytest.mark.parametrize("path", ["", "a\0b", "~" * 5000, "x" * 256, "x/" * 2048, "~no-such-user/tokens"])
@pytest.mark.parametrize("field", ["data.token_cache_dir", "data.tokenizer", "compilation.cache_dir"])
def test_what_no_file_system_takes_is_no_path(field, path):
    if (field, path) == ("compilation.cache_dir", ""):
        return  # turns the cache off
    refused = replace_at(CONFIG, field, path)
    assert isinstance(refused, ValueError)
    assert str(refused).startswith(f"{field}=")


def test_a_mask_may_nest_but_not_without_end():
    mask = deep = CausalMask()
    for _ in range(64):
        mask = mask & LocalMask(7, 0)
    for _ in range(10_000):
        deep = deep & LocalMask(7, 0)
    assert GPTConfig(masks=(mask,)).masks == (mask,)
    with pytest.raises(ValueError, match="more than 64 levels"):
        GPTConfig(masks=(mask & LocalMask(7, 0),))
    with pytest.raises(ValueError, match="more than 64 levels"):
        GPTConfig(masks=(deep,))
