"""The tiles and the backward that a call gets from the tuned tables of the `mosaic_gpu` kernels."""

import jax.numpy as jnp
import pytest

from kernels import CausalMask, FullMask, LocalMask, MosaicBackwardTuning, MosaicForwardTuning, Target
from kernels.backends.mosaic_gpu import tuning as tunings
from kernels.backends.mosaic_gpu.tuning import TunedCall, resolve
from kernels.backends.tuning import MosaicGpuTuning
from kernels.call import make_call

H200 = Target("gpu", "NVIDIA H200", 9.0, 132)


def call_of(*, head_dim=64, length=4096, mask=None, packed=False):
    """The static part of a call."""
    array = jnp.ones((1, length, 1, head_dim), jnp.bfloat16)
    ids = jnp.zeros((1, length), jnp.int32) if packed else None
    nothing = dict.fromkeys(("query_positions", "key_value_positions", "scale", "logits_soft_cap", "sinks"))
    mask = CausalMask() if mask is None else mask
    given = {**nothing, "query_segment_ids": ids, "key_value_segment_ids": ids}
    return make_call(array, array, array, mask, **given, return_lse=False)[1]._replace(target=H200)


def test_a_call_gets_the_form_of_its_device(monkeypatch):
    key, call = TunedCall(128, "causal", 4096), call_of(head_dim=128)
    monkeypatch.setattr(tunings, "FASTEST_BACKWARD", {key: "fused"})
    monkeypatch.setattr(tunings, "FASTEST_BACKWARD_ON", {call.target.device_kind: {key: "split"}, "another": {}})
    assert resolve(None, call).backward == "split"
    assert resolve(None, call._replace(target=Target("gpu", "another", 9.0, 132))).backward == "fused"
    assert resolve(None, call._replace(target=Target("gpu", "a third", 9.0, 132))).backward == "fused"


@pytest.mark.parametrize("head_dim", [32, 64, 80, 128, 192, 256])
def test_every_call_has_tiles(head_dim):
    for length in (64, 4096, 131_072):
        for kind in ({}, {"mask": FullMask()}, {"mask": LocalMask(4095, 0)}, {"packed": True}):
            call = call_of(head_dim=head_dim, length=length, **kind)
            for tuning in (None, MosaicGpuTuning("split")):
                resolved = resolve(tuning, call)
                assert isinstance(resolved.forward_tiles, MosaicForwardTuning)
                assert isinstance(resolved.backward_tiles, MosaicBackwardTuning)
                assert resolved.backward == "split" or head_dim <= max(key.head_dim for key in tunings.FUSED)


def test_a_call_gets_the_tiles_of_the_nearest_one(monkeypatch):
    kept = [(64, "causal", 4096), (64, "causal", 32768), (64, "window", 32768), (128, "packed", 32768)]
    kept += [(128, "causal", 4096), (128, "narrow_window", 256), (128, "narrow_window", 1024)]
    kept += [(256, "causal", 4096), (256, "causal", 32768)]
    rows = {TunedCall(*key): MosaicForwardTuning(num_l2_heads=number) for number, key in enumerate(kept, start=1)}
    monkeypatch.setattr(tunings, "FORWARD", rows)
    for expected, call in (
        (1, {"length": 8192}),
        (2, {"length": 16384}),
        (3, {"length": 64, "mask": LocalMask(7, 0)}),
        # A window as near to two: the longer one.
        *((6, {"head_dim": 128, "length": 64, "mask": LocalMask(window - 1, 0)}) for window in (1, 256, 500)),
        *((7, {"head_dim": 128, "length": 64, "mask": LocalMask(window - 1, 0)}) for window in (512, 2048)),
        # A window's length says nothing beside rows'.
        (8, {"head_dim": 256, "length": 4096, "mask": LocalMask(127, 0)}),
        (9, {"head_dim": 256, "length": 32768, "mask": LocalMask(127, 0)}),
        (5, {"head_dim": 128, "length": 64, "mask": LocalMask(2048, 0)}),
        (1, {"length": 64, "mask": FullMask()}),
        (4, {"head_dim": 80, "length": 64, "packed": True}),
        (5, {"head_dim": 128, "length": 1 << 20, "mask": LocalMask(7, 7)}),
    ):
        assert resolve(None, call_of(**call)).forward_tiles.num_l2_heads == expected, call


def test_a_backwards_tiles_are_those_of_its_form(monkeypatch):
    key, tiles = TunedCall(64, "causal", 4096), {"fused": MosaicBackwardTuning(1), "split": MosaicBackwardTuning(3)}
    monkeypatch.setattr(tunings, "FUSED", {key: tiles["fused"]})
    monkeypatch.setattr(tunings, "SPLIT", {key: tiles["split"]})
    for fastest in ("fused", "split"):
        monkeypatch.setattr(tunings, "FASTEST_BACKWARD", {key: fastest})
        assert resolve(None, call_of()).backward_tiles == tiles[fastest]
        for form in ("fused", "split"):
            assert resolve(MosaicGpuTuning(form), call_of()).backward_tiles == tiles[form]
