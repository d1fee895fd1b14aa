"""Default tiles of the splash kernel for each TPU generation, and what of the chip limits them."""

from __future__ import annotations

from kernels.backends.splash.launch import Pass
from kernels.backends.splash.passes import d_key_value_pass, d_query_pass, forward_pass, grid_of
from kernels.backends.splash.tile_grid import TileGrid
from kernels.call import AttentionCall
from kernels.tuning import SplashTuning

# By `jax.Device.device_kind`. All compile for head dims up to 256, forward and both backwards; none has been timed by
# this project, which has no TPU. The v6e's matrix unit has twice the side of the others'.
DEFAULTS = {
    "TPU v4": SplashTuning.square(512),
    "TPU v5 lite": SplashTuning.square(512),  # v5e
    "TPU v5": SplashTuning.square(512),  # v5p
    "TPU v6 lite": SplashTuning.square(1024),  # v6e
}
_OTHERS = SplashTuning.square(512)
_LONGER = SplashTuning.square(1024)

# Scalar memory of a core, 1 MiB on all of the above, less what the kernel keeps there besides the tile grid.
_GRID_BYTES = (1 << 20) - (64 << 10)


def resolve(tuning: SplashTuning | None, call: AttentionCall) -> SplashTuning:
    """The tiles of a call that names none: larger ones where the sequence is so long that the grid wouldn't fit."""
    if tuning is not None:
        return tuning
    tuning = DEFAULTS.get(call.target.device_kind, _OTHERS)
    return tuning if grid_excess(call, tuning) is None else _LONGER


def grid_excess(call: AttentionCall, tuning: SplashTuning) -> str | None:
    """Why the tile grids don't fit into scalar memory, or None if they do."""
    passes = [forward_pass(call, tuning), d_key_value_pass(call, tuning)]
    if tuning.backward == "split":
        passes.append(d_query_pass(call, tuning))
    largest, walk = max(((_grid_bytes(call, walk), walk) for walk in passes), key=lambda each: each[0])
    if largest <= _GRID_BYTES:
        return None
    return (
        f"its grid of {walk.block_q}×{walk.block_kv} tiles takes {largest:,} bytes of scalar memory, which has room "
        f"for {_GRID_BYTES:,}; use larger tiles (kernels.SplashTuning), or split the sequence over more devices"
    )


def _grid_bytes(call: AttentionCall, walk: Pass) -> int:
    grids = [grid_of(call._replace(mask=mask), walk) for mask in call.mask.distinct_heads(call.num_heads)]
    grid = TileGrid.of_masks(grids, idle_first=walk.transposed)
    return grid.num_bytes + (4 * grid.tiles.size if call.mask.needs_lookup else 0)
