"""A config that can't be read back from a workdir is refused before anything is trained or written."""

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest

import kernels
from kernels import BlockwiseTuning, CausalMask, LocalMask, Mask, MaskFn, MultiHeadMask, NumpyMask
from layers import GPTConfig, LayerOverride, MoEConfig, RopeScaling
from trainer.config import DataConfig, TrainConfig, WandbConfig
from trainer.config.file import check_types, require_readable
from trainer.errors import UserMistake
from trainer.workdir import claim_workdir

MODEL = GPTConfig(vocab_size=260, num_layers=2, width=16, num_heads=2, num_kv_heads=1, head_dim=8)


def config_of(**model: object) -> TrainConfig:
    return TrainConfig("tiny", dataclasses.replace(MODEL, **model), 200, sequence_length=64)


@dataclass(frozen=True)
class Dilated(Mask):
    """A mask of a page's own."""

    stride: int

    def __call__(self, q_pos, kv_pos):
        return (q_pos - kv_pos) % self.stride == 0


@dataclass(frozen=True)
class Own:
    """Holders of a page's own subclasses, which have the names of the classes that they derive from."""

    @dataclass(frozen=True)
    class CausalMask(CausalMask):
        def __call__(self, q_pos, kv_pos):
            return kv_pos < q_pos

    @dataclass(frozen=True)
    class BlockwiseTuning(BlockwiseTuning):
        pass

    @dataclass(frozen=True)
    class MoEConfig(MoEConfig):
        noise: float = 0.0


def odd(q, kv):
    return kv % 2 == 1


@pytest.mark.parametrize(
    "mask",
    [
        MaskFn(odd),
        CausalMask() & ~MaskFn(odd),
        CausalMask() & NumpyMask(np.ones((64, 64), bool)),
        MultiHeadMask([CausalMask(), MaskFn(odd)]),
        Dilated(2),
        Own.CausalMask(),
    ],
)
def test_a_mask_that_config_json_cannot_hold_is_refused_before_the_workdir_is_made(tmp_path, mask):
    with pytest.raises(UserMistake) as refused:
        claim_workdir(tmp_path / "run", config_of(masks=(CausalMask(), mask)))
    message = str(refused.value)
    assert message.startswith("model.masks: ")
    assert "could neither resume, nor be sampled or exported; compose it of FullMask, CausalMask, " in message
    assert len(message) < 700
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (config_of(implementation=Own.BlockwiseTuning(64, 64)), "model.implementation"),
        (config_of(moe=Own.MoEConfig(2, 1, 16)), "model.moe"),
    ],
)
def test_an_object_of_a_class_that_config_json_cannot_tell_is_refused(config, name):
    with pytest.raises(UserMistake, match=rf"{name}: .* can't be written .*; use the config's own classes"):
        require_readable(config)


def test_a_section_of_a_derived_class_is_refused():
    class OwnModel(GPTConfig):
        pass

    config = TrainConfig("tiny", OwnModel(**vars(MODEL)), 200, sequence_length=64)
    with pytest.raises(UserMistake, match=r"one of its sections is of a class that config\.json can't tell"):
        require_readable(config)


@pytest.mark.parametrize(
    "config",
    [
        config_of(
            masks=(kernels.FullMask() | kernels.PrefixMask(3), ~LocalMask(None, 2) & kernels.ChunkedCausalMask(16))
        ),
        config_of(masks=(CausalMask(-1) | LocalMask(None, 2),)),
        config_of(masks=(MultiHeadMask([CausalMask(), LocalMask(np.int64(3), np.int32(0))]),)),
        config_of(implementation=BlockwiseTuning(64, 64), moe=MoEConfig(2, 1, 16), rope_base=None),
        config_of(layer_overrides=(LayerOverride(), LayerOverride(rope_scaling=RopeScaling("linear", 2.0)))),
        dataclasses.replace(
            config_of(norm_epsilon=np.float64(1e-5)),
            data=DataConfig("text", ("a/*.txt",), end_of_document_token="</s>"),
        ),
    ],
)
def test_what_a_page_may_hold_is_read_back(config):
    require_readable(config)


@pytest.mark.parametrize("odd_value", [10**5000, "x" * 10_000], ids=["integer", "text"])
def test_a_value_of_another_type_is_told_in_few_words_however_long_it_is(odd_value):
    config = dataclasses.replace(config_of(), description=[odd_value])
    with pytest.raises(UserMistake, match=r"description=.* is of type list; expected str") as refused:
        check_types(config)
    assert len(str(refused.value)) < 300


def test_an_array_in_the_place_of_a_choice_is_of_another_type():
    with pytest.raises(UserMistake, match=r"wandb\.mode=array.* is not one of online, offline"):
        check_types(dataclasses.replace(config_of(), wandb=WandbConfig(mode=np.arange(2))))
