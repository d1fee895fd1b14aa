"""The search for tunings, with tiles of a backend that runs anywhere, and the table that comes of it."""

import dataclasses
import itertools
import math
import re

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmarks.attention.cases import CASES, Case, make_problem
from experiments.benchmarks.attention.contenders import compile_contender
from experiments.benchmarks.attention.speed_table import read_rows
from experiments.benchmarks.tune_attention import __main__ as command
from experiments.benchmarks.tune_attention import race as race_module
from experiments.benchmarks.tune_attention import table
from experiments.benchmarks.tune_attention.race import Trial, best_of, largest_relative_difference, race
from kernels import BlockwiseTuning, CausalMask, FullMask, LocalMask, MosaicBackwardTuning, MosaicForwardTuning, Target
from kernels.backends.mosaic_gpu import tuning as tunings
from kernels.backends.mosaic_gpu.search_space import SEARCH_SPACES, SearchSpace, backend_tuning, known_tiles, variations
from kernels.backends.mosaic_gpu.shared_memory import MAX_BYTES, shared_memory_bytes
from kernels.backends.mosaic_gpu.tuning import TunedCall, resolve
from kernels.backends.tuning import MosaicGpuTuning
from kernels.call import make_call

SMALL = Case(1, 256, 2, 1, 16, CausalMask(), "float32")
ROW = {"device": "NVIDIA H200", "jax": "0.11.2", "date": "2026-11-21", "chosen": True}


H200 = Target("gpu", "NVIDIA H200", 9.0, 132)


def call_of(*, head_dim=64, length=4096, mask=None, packed=False):
    """The static part of a call."""
    array = jnp.ones((1, length, 1, head_dim), jnp.bfloat16)
    ids = jnp.zeros((1, length), jnp.int32) if packed else None
    nothing = dict.fromkeys(("query_positions", "key_value_positions", "scale", "logits_soft_cap", "sinks"))
    mask = CausalMask() if mask is None else mask
    given = {**nothing, "query_segment_ids": ids, "key_value_segment_ids": ids}
    return make_call(array, array, array, mask, **given, return_lse=False)[1]._replace(target=H200)


@pytest.mark.jax_0_11
@pytest.mark.parametrize(
    ("search", "settings", "expected"),
    [
        ("forward", {"num_warpgroups": (2, 3, 4), "num_stages": (2, 3)}, [(2, 2), (2, 3), (3, 2), (3, 3)]),
        # What only the other backward takes is left out,
        ("fused", {"num_warpgroups": (2, 3), "block_q": (64, 128)}, [(2, 64), (2, 128)]),
        ("split", {"num_warpgroups": (2, 3), "block_q": (64, 128)}, [(2, 64), (2, 128), (3, 64), (3, 128)]),
        # and what doesn't fit into shared memory: a stage has 2 × 128 × 2 bytes for each key, beside 2 × 64 queries.
        (
            "forward",
            {"block_kv": (64, 128), "num_stages": (2, 3, 4)},
            [(64, 2), (64, 3), (64, 4), (128, 2), (128, 3)],
        ),
    ],
)
def test_variations_are_all_combinations_that_can_be_made(search, settings, expected):
    call = call_of(head_dim=128 if "block_kv" in settings else 64)
    start = MosaicForwardTuning() if search == "forward" else MosaicBackwardTuning()
    found = variations(search, start, settings, None, call)
    assert sorted(tuple(getattr(tiles, name) for name in settings) for tiles in found) == expected
    if search == "forward":
        assert next(iter(found)) == start or "block_kv" in settings
        for tuning in found.values():
            assert max(shared_memory_bytes(call, resolve(tuning, call)).values()) <= MAX_BYTES


@pytest.mark.jax_0_11
@pytest.mark.parametrize("search", SEARCH_SPACES)
def test_known_tiles_are_todays_and_those_of_all_calls_of_the_head_dim(search):
    call, tiles = call_of(head_dim=128, length=4096), SEARCH_SPACES[search].start
    known = known_tiles(search, tiles, None, call)
    tables = {"fused": [tunings.FUSED], "split": [tunings.SPLIT]}.get(search, [tunings.FORWARD, tunings.FEW_BLOCKS])
    assert next(iter(known)) == tiles
    assert set(known) == {tiles, *(t for each in tables for key, t in each.items() if key.head_dim == 128)}
    assert len({t.num_warpgroups for t in known}) == (1 if search in ("fused", "split") else 2)
    for found, tuning in known.items():
        assert tuning == backend_tuning(search, found, None)
    # A fused backward isn't for heads so wide.
    wide = known_tiles(search, tiles, None, call_of(head_dim=256))
    assert (len(wide) == 0) == (search == "fused")


def test_the_stages_of_a_search_are_the_known_tiles_and_the_settings_that_are_named():
    space = SearchSpace(BlockwiseTuning(64, 128), ({"block_q": (64, 128)}, {"block_kv": (64, 128)}))
    assert list(command.stages_of(space, None)) == [("known", None), (0, space.stages[0]), (1, space.stages[1])]
    assert list(command.stages_of(space, ["block_kv"])) == [("known", None), (1, space.stages[1])]


@pytest.mark.jax_0_11
def test_blocks_are_few_where_heads_are():
    call = call_of(head_dim=128, length=32768)
    assert command.has_few_blocks(MosaicForwardTuning(), call)
    assert not command.has_few_blocks(MosaicForwardTuning(), call._replace(num_heads=64, num_kv_heads=64))


@pytest.mark.jax_0_11
@pytest.mark.parametrize("head_dim", [32, 64, 128, 192, 256])
@pytest.mark.parametrize("search", SEARCH_SPACES)
def test_every_setting_that_is_searched_exists(search, head_dim):
    call, space = call_of(head_dim=head_dim), SEARCH_SPACES[search]
    forward = resolve(None, call).forward_tiles
    for settings in space.stages:
        assert set(settings) <= set(vars(space.start))
    found = variations(search, space.start, space.stages[0], forward, call)
    assert (len(found) > 0) == (search != "fused" or head_dim <= 128)
    for tiles, made in found.items():
        given = (search, forward, tiles) if search in ("fused", "split") else (None, tiles)
        assert made == MosaicGpuTuning(*given) == backend_tuning(search, tiles, forward)


@pytest.mark.parametrize("timed", ["forward", "forward_backward"])
def test_a_race_times_what_is_right_and_says_what_is_wrong_or_fails(timed):
    problem = make_problem(SMALL)
    expected = compile_contender(problem, "reference", timed).start()
    candidates = {"small": BlockwiseTuning(32, 64), "large": BlockwiseTuning(256, 256), "absent": MosaicGpuTuning()}
    how = {"num_rounds": 1, "sample_ms": 0, "hopeless": math.inf}
    small, large, absent = race(problem, timed, candidates, expected, **how)
    assert [trial.tuning for trial in (small, large, absent)] == list(candidates)
    assert (small.seconds > 0, large.seconds > 0, absent.seconds) == (True, True, None)
    assert "can't serve this call" in absent.refused
    other = compile_contender(make_problem(SMALL), "reference", timed).start()
    (wrong,) = race(problem, timed, {"small": BlockwiseTuning(32, 64)}, other, **how)
    assert wrong.seconds is None
    assert re.fullmatch(r"differs by 1\.\de\+00", wrong.refused)


@pytest.fixture
def race_of_clocks(monkeypatch):
    """A race of square tiles, of which each has a clock: an iterator of moments."""

    def run(clock_of, *sizes: int) -> list[Trial]:
        def compile_with_clock(problem, tuning, timed):
            moments = clock_of(tuning.block_q)
            return dataclasses.replace(compile_contender(problem, tuning, timed), clock=lambda: next(moments))

        monkeypatch.setattr(race_module, "compile_contender", compile_with_clock)
        problem = make_problem(SMALL)
        expected = compile_contender(problem, "reference", "forward").start()
        candidates = {size: BlockwiseTuning(size, size) for size in sizes}
        return race(problem, "forward", candidates, expected, num_rounds=1, sample_ms=0, hopeless=1.25)

    return run


def test_what_is_hopelessly_slow_sits_the_rounds_out(race_of_clocks):
    seconds = {32: 1.5, 64: 1.25, 128: 1.0}
    slow, near, fast = race_of_clocks(lambda size: itertools.count(step=seconds[size]), 32, 64, 128)
    assert (slow.seconds, slow.refused) == (None, "takes 1.5 times as long as the fastest")
    assert (near.seconds, near.refused) == (1.25, None)
    assert (fast.seconds, fast.refused) == (1.0, None)


def test_a_slow_first_sample_is_taken_again(race_of_clocks):
    def clock_of(size):
        # Two runs and a sample, of a second each, but that the first sample of the small tuning takes three.
        return itertools.chain([0, 1, 1, 2, 2, 5 if size == 32 else 3], itertools.count(5))

    assert [trial.refused for trial in race_of_clocks(clock_of, 32, 64)] == [None, None]


def test_a_difference_is_the_worst_arrays_and_nan_stays():
    x = jnp.ones((4, 4))
    assert largest_relative_difference((x, (x, 1.5 * x)), (x, (x, x))) == pytest.approx(0.5)
    assert np.isnan(largest_relative_difference((x, x * jnp.nan), (x, x)))


@pytest.mark.jax_0_11
def test_a_search_begins_with_the_tiles_that_the_call_takes():
    call = call_of(head_dim=128, length=8192)
    today = resolve(MosaicGpuTuning("split"), call)
    assert command.tiles_to_begin_with("forward", call) == today.forward_tiles != SEARCH_SPACES["forward"].start
    assert command.tiles_to_begin_with("split", call) == today.backward_tiles != SEARCH_SPACES["split"].start


@pytest.mark.jax_0_11
def test_a_search_begins_with_others_where_no_tiles_serve_the_call():
    # The fused backward isn't for heads so wide.
    assert command.tiles_to_begin_with("fused", call_of(head_dim=256)) == SEARCH_SPACES["fused"].start


def test_the_incumbent_keeps_its_place_unless_another_is_clearly_faster():
    assert best_of([Trial("old", 1.0), Trial("new", 0.995)], "old") == "old"
    assert best_of([Trial("old", 1.0), Trial("new", 0.98), Trial("newer", 0.97)], "old") == "newer"
    assert best_of([Trial("old", refused="no"), Trial("new", 2.0)], "old") == "new"
    assert best_of([Trial("old", refused="no")], "old") is None


def test_the_command_searches_in_stages_and_keeps_rows_and_table(tmp_path, monkeypatch, capsys):
    start, stages = BlockwiseTuning(64, 128), ({"block_q": (64, 128)}, {"block_kv": (64, 128)})
    tried = {"forward": SearchSpace(start, stages), "few_blocks": SearchSpace(start, stages[:1])}
    tried |= dict.fromkeys(("fused", "split"), SearchSpace(start, ({},)))

    def all_variations(search, tiles, settings, forward, call):
        combinations = itertools.product(*settings.values())
        return {(t := dataclasses.replace(tiles, **dict(zip(settings, c, strict=True)))): t for c in combinations}

    known = {"forward": (BlockwiseTuning(64, 64), BlockwiseTuning(128, 128))}
    stubs = {
        "SEARCH_SPACES": tried,
        "variations": all_variations,
        "known_tiles": lambda search, tiles, forward, call: {t: t for t in (tiles, *known.get(search, ()))},
        "backend_tuning": lambda search, tiles, forward: tiles,
        "unsupported_reason": lambda call: None,
        "tiles_to_begin_with": lambda search, call: tried[search].start,
        "has_few_blocks": lambda tiles, call: False,
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(command, name, stub)
    for search in tried:
        monkeypatch.setitem(table.SECTIONS, search, (search.upper(), BlockwiseTuning))
    monkeypatch.setitem(CASES, "small", SMALL)
    output, written = tmp_path / "new" / "rows.jsonl", tmp_path / "tuned.py"
    arguments = command.SearchArguments(cases=("small",), num_rounds=1, sample_ms=0, output=output, table=written)
    assert command.main(arguments) == 0
    rows = read_rows(output)
    assert [(row["search"], row["stage"]) for row in rows if row["chosen"]] == [
        *(("forward", "known"), ("forward", 0), ("forward", 1), ("fused", 0), ("split", 0), ("fastest_backward", 0))
    ]
    known_ones, first, second = (row["tuning"] for row in rows if row["search"] == "forward" and row["chosen"])
    assert first["block_kv"] == known_ones["block_kv"]
    assert second["block_q"] == first["block_q"]
    assert "forward known: 3 candidates" in (out := capsys.readouterr().out)
    assert written.read_text() == table.render(rows)
    assert "forward 1: 2 candidates" in out
    assert "small, few_blocks: not searched" in out

    def searched(*searches: str, settings=None) -> set:
        num_rows = len(read_rows(output))
        assert command.main(dataclasses.replace(arguments, searches=searches, settings=settings)) == 0
        return {(row["search"], row["stage"]) for row in read_rows(output)[num_rows:]}

    assert searched("split") == {("split", 0)}
    assert searched("forward", "fused", settings=("block_kv",)) == {("forward", "known"), ("forward", 1)}
    monkeypatch.setattr(command, "has_few_blocks", lambda tiles, call: True)
    assert searched("few_blocks") == {("few_blocks", 0)}
    for searches, settings, told in (
        ("forward", "block", r"none of .* forward; expected some of block_q, block_kv$"),
        ("split", "block_q", "none of the searches split; expected some of"),
    ):
        with pytest.raises(ValueError, match=rf"\['{settings}'\] are tried by {told}"):
            dataclasses.replace(arguments, searches=(searches,), settings=(settings,))

    monkeypatch.undo()
    output.write_text("")
    monkeypatch.setitem(CASES, "small", dataclasses.replace(SMALL, dtype="bfloat16"))
    assert command.main(arguments) == 2
    assert "the kernels can't serve small: mosaic_gpu " in capsys.readouterr().err

    late = dataclasses.replace(arguments, budget_s=0)
    assert command.main(late) == 1
    assert "search with --cases for them" in capsys.readouterr().err


def test_a_table_is_source_of_the_latest_winners():
    case = {"mask": repr(LocalMask(1023, 0)), "document_length": None, "head_dim": 64, "length": 4096, **ROW}
    rows = [
        {**case, "search": "forward", "tuning": dataclasses.asdict(MosaicForwardTuning(1))},
        {**case, "search": "forward", "tuning": dataclasses.asdict(MosaicForwardTuning(3))},
        {**case, "search": "forward", "tuning": dataclasses.asdict(MosaicForwardTuning(2)), "chosen": False},
        {**case, "search": "fastest_backward", "tuning": "split", "document_length": 512},
    ]
    found: dict = {}
    exec(table.render(rows), found)
    assert found["FORWARD"] == {(64, "narrow_window", 1024): (3, 128, 2, True, False, 24)}
    assert found["FASTEST_BACKWARD"] == {(64, "packed", 4096): "split"}
    assert found["FASTEST_BACKWARD_ON"] == {}
    assert "NVIDIA H200, JAX 0.11.2, 2026-11-21" in found["__doc__"]


def test_a_table_has_the_form_that_is_another_one_on_a_device():
    case = {"mask": "CausalMask()", "document_length": None, "head_dim": 64, **ROW, "search": "fastest_backward"}
    rows = [
        {**case, "length": 4096, "tuning": "fused", "device": "one GPU"},
        {**case, "length": 32768, "tuning": "fused", "device": "one GPU"},
        {**case, "length": 4096, "tuning": "split"},
        {**case, "length": 32768, "tuning": "fused"},
    ]
    found: dict = {}
    exec(table.render(rows), found)
    assert found["FASTEST_BACKWARD"] == {(64, "causal", 4096): "split", (64, "causal", 32768): "fused"}
    assert found["FASTEST_BACKWARD_ON"] == {"one GPU": {(64, "causal", 4096): "fused"}}


def test_a_call_gets_the_form_of_its_device(monkeypatch):
    key, call = TunedCall(128, "causal", 4096), call_of(head_dim=128)
    monkeypatch.setattr(tunings, "FASTEST_BACKWARD", {key: "fused"})
    monkeypatch.setattr(tunings, "FASTEST_BACKWARD_ON", {call.target.device_kind: {key: "split"}, "another": {}})
    assert resolve(None, call).backward == "split"
    assert resolve(None, call._replace(target=Target("gpu", "another", 9.0, 132))).backward == "fused"
    assert resolve(None, call._replace(target=Target("gpu", "a third", 9.0, 132))).backward == "fused"


def test_the_table_is_made_from_the_rows_that_are_kept():
    kept = table.TableArguments()
    made = table.render(read_rows(kept.results))
    assert kept.table.read_text() == made, "make it again: python -m experiments.benchmarks.tune_attention.table"


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


def test_a_call_gets_the_tiles_of_the_likest_one(monkeypatch):
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
