"""Finds the best tiles of the `mosaic_gpu` kernels on the GPU at hand, and writes the table that they choose from.

    python -m experiments.benchmarks.tune_attention

For each case, the tiles of all calls of its head dim are tried first, then settings that matter together in every
combination: compiled, held to what `blockwise` computes, and timed in rounds of all. The tiles that the call takes
today keep their place unless others are clearly faster. What a kernel refuses, and what doesn't fit into shared memory,
isn't tried.
Whatever stops the search, the rows of what was measured are kept; `python -m
experiments.benchmarks.tune_attention.table` makes the table of them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from experiments.benchmarks.attention.cases import Case, Direction, describe, known_cases, make_problem
from experiments.benchmarks.attention.contenders import compile_contender
from experiments.benchmarks.attention.measure import where
from experiments.benchmarks.command_line import read_arguments
from experiments.benchmarks.tune_attention import table
from experiments.benchmarks.tune_attention.race import best_of, race
from kernels.backends.mosaic_gpu.makespan import makespan_of_few_blocks
from kernels.backends.mosaic_gpu.search_space import (
    FORWARD_SEARCHES,
    SEARCH_SPACES,
    Searched,
    SearchSpace,
    Settings,
    backend_tuning,
    known_tiles,
    variations,
)
from kernels.backends.mosaic_gpu.support import unsupported_reason
from kernels.backends.mosaic_gpu.tuning import MosaicBackwardTuning, MosaicForwardTuning, resolve
from kernels.call import AttentionCall, make_call
from trainer.terminal.streams import reader_may_leave

FORMS: tuple[Literal["fused", "split"], ...] = ("fused", "split")


@dataclass(frozen=True)
class SearchArguments:
    """Finds the best tiles of the kernels for each kind of call."""

    cases: tuple[str, ...] = (
        "1x16x32768x128",
        "1x12x32768x64",
        "1x16/2x32768x256",
        "1x16x32768x128_window_4096",
        "1x16x32768x128_window_1024",
        "1x16x32768x128_documents",
        "4x24x4096x128",
        "4x24x4096x64",
        "gpt2_documents",
        "1x2x32768x32",
        "4x16/2x4096x256",
        "4x24x4096x32",
        "1x16x32768x128_full",
        "1x16x32768x192/128",
    )
    """Names from the attention benchmark's CASES: each stands for its head dim, kind of mask and length."""
    searches: tuple[str, ...] = tuple(table.SECTIONS)
    """Tables to search for; the others keep what they have."""
    settings: tuple[str, ...] | None = None
    """Settings to try, the others staying as in the best of the known tiles; None: all."""
    num_rounds: int = 12
    """Rounds of a race; the medians count. Single timings scatter by more than good candidates differ: with few rounds
    chance decides between them."""
    sample_ms: float = 200.0
    """Least length of one timing, in ms; see the attention benchmark's."""
    budget_s: float = 3600.0
    """Seconds after which no further case is begun."""
    output: Path = table.TableArguments.results
    """File that the rows are appended to, each race's as soon as it is over."""
    table: Path = table.TableArguments.table
    """The table, which is made anew from all rows of the output."""

    def __post_init__(self):
        known_cases(self.cases)
        if unknown := set(self.searches) - set(table.SECTIONS):
            raise ValueError(f"unknown searches {sorted(unknown)}; expected some of {', '.join(table.SECTIONS)}")
        stages = [stage for search, space in SEARCH_SPACES.items() if search in self.searches for stage in space.stages]
        tried = dict.fromkeys(name for stage in stages for name in stage)
        if unknown := set(self.settings or ()) - set(tried):
            raise ValueError(
                f"settings {sorted(unknown)} are tried by none of the searches {', '.join(self.searches)}; "
                f"expected some of {', '.join(tried)}"
            )


def tiles_to_begin_with(search: Searched, call: AttentionCall) -> MosaicForwardTuning | MosaicBackwardTuning:
    """The tiles that a call takes today, which others must beat; the search space's, if these don't serve the call."""
    tuning = backend_tuning(search, None, None)
    if unsupported_reason(call, tuning) is not None:
        return SEARCH_SPACES[search].start
    today = resolve(tuning, call)
    tiles = today.forward_tiles if search in FORWARD_SEARCHES else today.backward_tiles
    assert tiles is not None, "resolved"
    return tiles


def has_few_blocks(tiles: MosaicForwardTuning, call: AttentionCall) -> bool:
    """True if a call may take the tiles of calls of few blocks instead of its own."""
    return makespan_of_few_blocks(tiles.block_q, tiles.block_kv, tiles.num_l2_heads, call) is not None


def stages_of(space: SearchSpace, names: Sequence[str] | None) -> Iterator[tuple[str | int, Settings | None]]:
    """The stages of a search: first the known tiles (None), then settings, only those of these `names`."""
    yield "known", None
    for stage, settings in enumerate(space.stages):
        chosen = {name: values for name, values in settings.items() if names is None or name in names}
        if chosen or names is None:
            yield stage, chosen


def search_case(name: str, case: Case, arguments: SearchArguments) -> Iterator[list[dict[str, Any]]]:
    """Searches for one case; the rows of each race, as soon as it is over.

    Raises:
      ValueError: the kernels don't run here.
    """
    problem = make_problem(case)
    _, call = make_call(
        problem.arrays["query"],
        problem.arrays["key"],
        problem.arrays["value"],
        case.mask,
        query_segment_ids=problem.segment_ids,
        key_value_segment_ids=problem.segment_ids,
        query_positions=None,
        key_value_positions=None,
        scale=None,
        logits_soft_cap=None,
        sinks=problem.arrays.get("sinks"),
        return_lse=False,
    )
    if (reason := unsupported_reason(call)) is not None:
        raise ValueError(f"the kernels can't serve {name}: mosaic_gpu {reason}")
    common = {"case": name, **describe(case), **where()}
    best: dict[str, Any] = {}

    @functools.cache
    def expected(timed: Direction) -> Any:
        return compile_contender(problem, "blockwise", timed).start()

    def run(
        search: str, stage: int | str, candidates: dict[Any, Any], timed: Direction, incumbent
    ) -> list[dict[str, Any]]:
        print(f"{name}, {search} {stage}: {len(candidates)} candidates", end="", flush=True)
        begin = time.monotonic()
        trials = race(
            problem, timed, candidates, expected(timed), num_rounds=arguments.num_rounds, sample_ms=arguments.sample_ms
        )
        best[search] = best_of(trials, incumbent)
        print(f", {time.monotonic() - begin:.1f} s: {best[search]}", flush=True)
        return [
            {
                **common,
                "search": search,
                "stage": stage,
                "tuning": trial.tuning if isinstance(trial.tuning, str) else dataclasses.asdict(trial.tuning),
                "chosen": trial.tuning == best[search],
                **({"seconds": trial.seconds} if trial.refused is None else {"refused": trial.refused}),
            }
            for trial in trials
        ]

    for search, space in SEARCH_SPACES.items():
        if search == "few_blocks" and not has_few_blocks(best["forward"], call):
            if search in arguments.searches:
                print(f"{name}, few_blocks: not searched, its blocks are many, or it isn't known how many")
            continue
        best[search] = tiles_to_begin_with(search, call)
        timed: Direction = "forward" if search in FORWARD_SEARCHES else "forward_backward"
        for stage, settings in stages_of(space, arguments.settings) if search in arguments.searches else ():
            if settings is None:
                candidates = known_tiles(search, best[search], best["forward"], call)
                if len(candidates) < 2:
                    continue
            else:
                candidates = variations(search, best[search], settings, best["forward"], call)
            rows = run(search, stage, candidates, timed, best[search])
            yield rows
            if best[search] is None:
                break
        if search == "forward" and best[search] is None:
            raise ValueError(f"no forward kernel ran for {name}; the first: {rows[0]['refused']}")
    if "fastest_backward" not in arguments.searches:
        return
    forms = {form: backend_tuning(form, best[form], best["forward"]) for form in FORMS if best[form]}
    yield run("fastest_backward", 0, forms, "forward_backward", resolve(None, call).backward)


def main(arguments: SearchArguments) -> int:
    """Searches, and writes the table; returns the exit status."""
    begin, left = time.monotonic(), dict(known_cases(arguments.cases))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    try:
        while left and time.monotonic() - begin < arguments.budget_s:
            name = next(iter(left))
            for rows in search_case(name, left.pop(name), arguments):
                with arguments.output.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(row) + "\n" for row in rows)
    except ValueError as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    table.main(table.TableArguments(results=arguments.output, table=arguments.table))
    if left:
        print(f"error: no time was left for {' '.join(left)}; search with --cases for them", file=sys.stderr)
    return 1 if left else 0


if __name__ == "__main__":
    with reader_may_leave():
        sys.exit(main(read_arguments(SearchArguments)))
