"""The best tunings found, by kind of call, on H100s and H200s (JAX 0.11.2, 2026-11-21 to 2026-11-28).

A search timed candidates of equal results in turns; some of the winners were chosen by hand. The rows of both are in
experiments/benchmarks/results/tuning_hopper.jsonl. Time a change by `python -m experiments.benchmarks.attention`.

Each key is (head dim, family of the mask, length in tokens), the fields of a `TunedCall`.
"""

from typing import Literal

_Key = tuple[int, Literal["full", "causal", "window", "narrow_window", "packed", "other"], int]

FORWARD: dict[_Key, tuple[int, int, int, bool, bool, int]] = {
    # num_warpgroups, block_kv, num_stages, ping_pong, persistent, num_l2_heads
    (32, "causal", 4096): (3, 64, 3, True, True, 24),
    (32, "causal", 32768): (3, 64, 3, True, True, 24),
    (64, "causal", 4096): (3, 64, 4, False, True, 24),
    (64, "causal", 16384): (3, 64, 4, False, True, 8),
    (64, "causal", 32768): (3, 64, 4, False, False, 4),
    (64, "narrow_window", 128): (3, 64, 4, False, True, 1),
    (64, "narrow_window", 1024): (3, 64, 4, False, True, 24),
    (64, "packed", 32768): (3, 64, 4, False, True, 24),
    (128, "causal", 1024): (3, 64, 3, False, True, 32),
    (128, "causal", 4096): (3, 64, 3, False, True, 8),
    (128, "causal", 8192): (3, 64, 3, False, True, 4),
    (128, "causal", 32768): (3, 64, 2, False, False, 4),
    (128, "full", 32768): (3, 64, 2, False, False, 1),
    (128, "narrow_window", 128): (2, 64, 4, False, True, 4),
    (128, "narrow_window", 256): (3, 64, 3, False, True, 24),
    (128, "narrow_window", 512): (3, 64, 3, False, True, 48),
    (128, "narrow_window", 1024): (3, 64, 3, False, True, 4),
    (128, "packed", 32768): (3, 64, 3, False, True, 24),
    (128, "window", 32768): (3, 64, 3, False, True, 4),
    (160, "causal", 32768): (3, 64, 2, False, False, 4),
    (256, "causal", 4096): (2, 64, 2, False, False, 24),
    (256, "causal", 32768): (2, 64, 2, False, False, 24),
}

FEW_BLOCKS: dict[_Key, tuple[int, int, int, bool, bool, int]] = {
    # num_warpgroups, block_kv, num_stages, ping_pong, persistent, num_l2_heads
    (128, "causal", 32768): (2, 128, 2, False, True, 4),
}

FUSED: dict[_Key, tuple[int, int, int, bool, int, int, int, bool]] = {
    # num_warpgroups, block_q, num_stages, one_gradient_per_warpgroup, block_kv_dq, num_stages_dq, num_l2_heads,
    # persistent
    (32, "causal", 4096): (2, 128, 2, False, 64, 2, 12, False),
    (32, "causal", 32768): (2, 128, 2, False, 64, 2, 24, False),
    (64, "causal", 512): (2, 128, 2, False, 64, 2, 1, True),
    (64, "causal", 4096): (2, 128, 2, False, 64, 2, 4, True),
    (64, "causal", 32768): (2, 128, 2, False, 64, 2, 2, False),
    (64, "narrow_window", 128): (2, 128, 2, False, 64, 2, 2, False),
    (64, "narrow_window", 1024): (2, 128, 2, False, 64, 2, 48, True),
    (64, "packed", 32768): (2, 128, 2, False, 64, 2, 48, False),
    (128, "causal", 1024): (2, 64, 2, False, 64, 2, 8, True),
    (128, "causal", 4096): (2, 64, 2, False, 64, 2, 8, True),
    (128, "causal", 32768): (2, 64, 2, False, 64, 2, 2, False),
    (128, "full", 32768): (2, 64, 2, False, 64, 2, 2, False),
    (128, "narrow_window", 128): (2, 64, 2, False, 64, 2, 48, True),
    (128, "narrow_window", 256): (2, 64, 2, False, 64, 2, 48, True),
    (128, "narrow_window", 1024): (2, 64, 2, False, 64, 2, 24, True),
    (128, "packed", 32768): (2, 64, 2, False, 64, 2, 4, False),
    (128, "window", 32768): (2, 64, 2, False, 64, 2, 2, False),
    (160, "causal", 32768): (2, 64, 2, False, 64, 2, 2, False),
}

SPLIT: dict[_Key, tuple[int, int, int, bool, int, int, int, bool]] = {
    # num_warpgroups, block_q, num_stages, one_gradient_per_warpgroup, block_kv_dq, num_stages_dq, num_l2_heads,
    # persistent
    (32, "causal", 4096): (2, 128, 2, False, 128, 2, 24, False),
    (32, "causal", 32768): (3, 64, 2, False, 64, 2, 24, False),
    (64, "causal", 512): (2, 64, 2, False, 128, 2, 4, True),
    (64, "causal", 4096): (2, 128, 2, False, 128, 2, 24, False),
    (64, "causal", 32768): (3, 64, 2, False, 64, 2, 24, False),
    (64, "narrow_window", 128): (2, 128, 2, False, 64, 2, 24, False),
    (64, "narrow_window", 1024): (2, 64, 2, False, 128, 2, 4, True),
    (64, "packed", 32768): (3, 64, 2, False, 64, 2, 24, False),
    (128, "causal", 1024): (2, 64, 2, False, 128, 2, 4, True),
    (128, "causal", 4096): (2, 64, 2, False, 128, 2, 24, False),
    (128, "causal", 32768): (2, 64, 2, False, 128, 2, 24, False),
    (128, "full", 32768): (2, 64, 2, False, 128, 2, 24, False),
    (128, "narrow_window", 128): (2, 64, 2, False, 128, 2, 24, True),
    (128, "narrow_window", 256): (2, 64, 2, False, 64, 2, 24, False),
    (128, "narrow_window", 512): (2, 64, 2, False, 128, 2, 24, True),
    (128, "narrow_window", 1024): (2, 64, 1, False, 128, 2, 24, True),
    (128, "packed", 32768): (2, 64, 2, False, 64, 2, 24, False),
    (128, "window", 32768): (2, 64, 2, False, 128, 2, 24, False),
    (256, "causal", 4096): (2, 64, 2, True, 64, 2, 24, False),
    (256, "causal", 32768): (2, 64, 2, True, 64, 2, 24, False),
}

FASTEST_BACKWARD: dict[_Key, Literal["fused", "split"]] = {
    (32, "causal", 4096): "fused",
    (32, "causal", 32768): "fused",
    (64, "causal", 512): "split",
    (64, "causal", 1024): "fused",
    (64, "causal", 4096): "fused",
    (64, "causal", 32768): "fused",
    (64, "narrow_window", 128): "fused",
    (64, "narrow_window", 1024): "fused",
    (64, "packed", 32768): "fused",
    (128, "causal", 1024): "fused",
    (128, "causal", 4096): "fused",
    (128, "causal", 32768): "fused",
    (128, "full", 32768): "fused",
    (128, "narrow_window", 128): "split",
    (128, "narrow_window", 256): "fused",
    (128, "narrow_window", 512): "fused",
    (128, "narrow_window", 1024): "fused",
    (128, "packed", 32768): "fused",
    (128, "window", 32768): "fused",
    (160, "causal", 32768): "fused",
    (256, "causal", 4096): "split",
    (256, "causal", 32768): "split",
}

FASTEST_BACKWARD_ON: dict[str, dict[_Key, Literal["fused", "split"]]] = {
    # Where it is another one on such a GPU.
    "NVIDIA H100 80GB HBM3": {
        (64, "narrow_window", 128): "split",
        (128, "causal", 1024): "split",
        (128, "narrow_window", 256): "split",
    },
}
