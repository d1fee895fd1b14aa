"""The benchmark of exchanges: what it reads off a trace, and what it refuses."""

import dataclasses

from experiments.benchmarks.context_attention import main
from experiments.benchmarks.traced_exchange import summarize
from experiments.benchmarks.train_throughput.breakdown import TracedKernel
from trainer.compile.hlo import parse_module

MODULE = parse_module(
    """HloModule m

%branch_0 (p: f32[8,4]) -> f32[8,4] {
  %p = f32[8,4] parameter(0)
  %few = f32[8,4] fusion(%p), kind=kLoop, calls=%f
  ROOT %all-to-all.1 = f32[8,4] all-to-all(%few), replica_groups={{0,1,2,3}}
}

%branch_1 (p: f32[8,4]) -> f32[8,4] {
  %p.1 = f32[8,4] parameter(0)
  %many = f32[8,4] fusion(%p.1), kind=kLoop, calls=%f
  %all-gather-start = (f32[2,4], f32[8,4]) all-gather-start(%many), replica_groups=[1,4]<=[4], dimensions={0}
  ROOT %all-gather-done = f32[8,4] all-gather-done(%all-gather-start)
}

ENTRY %main (a: f32[8,4], i: s32[]) -> f32[8,4] {
  %a = f32[8,4] parameter(0)
  %i = s32[] parameter(1)
  %brought = f32[8,4] conditional(%i, %a, %a), branch_computations={%branch_0, %branch_1}
  %permuted = f32[8,4] collective-permute(%brought), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  %chunks = f32[8,4] custom-call(%permuted), custom_call_target="mosaic_gpu_v2", metadata={op_name="f/gather_chunks/x"}
  ROOT %attend = f32[8,4] custom-call(%chunks), custom_call_target="mosaic_gpu_v2", metadata={op_name="f/kernel/x"}
}
"""
)
# One run, in which the second branch runs. The collective's name isn't the instruction's.
FIRST = [
    TracedKernel("loop_fusion", "many", 0, 10),
    TracedKernel("ncclDevKernel_AllGather", "all_gather.7", 10, 40),
    TracedKernel("ncclDevKernel_SendRecv", "permuted", 45, 60),
    TracedKernel("kernel", "chunks", 60, 65),
    TracedKernel("kernel", "attend", 63, 163),
    TracedKernel("ncclDevKernel_SendRecv", "other", 150, 170),
]


def later(seconds_of_waiting):
    """A GPU that comes late to the first collective, and waits in the others."""
    changed = dataclasses.replace(FIRST[1], start_ns=40 - seconds_of_waiting)
    longer = dataclasses.replace(FIRST[2], stop_ns=200), dataclasses.replace(FIRST[5], stop_ns=300)
    return [FIRST[0], changed, longer[0], *FIRST[3:5], longer[1]]


def test_a_trace_tells_what_no_kernel_hides():
    found = summarize([FIRST, later(12), FIRST, FIRST, []], MODULE, 1)
    nanoseconds = [round(1e9 * seconds, 3) for seconds in found[:5]]
    # The whole is 170, of which attention takes 100, nothing runs in 5, and the late GPU has 12 of the 30.
    assert nanoseconds == [100, 70, 5, 30 + 15 + 20, 18]
    # Three quarters of the gather's 128 bytes and the whole of the permute's; nothing of the branch that didn't run.
    assert found.received_bytes == 96 + 128


def test_a_trace_of_several_runs_gives_one_runs_mean():
    again = [dataclasses.replace(k, start_ns=k.start_ns + 200, stop_ns=k.stop_ns + 200) for k in FIRST]
    found = summarize([FIRST + again] * 4, MODULE, 2)
    assert [round(1e9 * seconds, 3) for seconds in found[:5]] == [100, (370 - 200) / 2, (5 + 5 + 30) / 2, 65, 0]
    assert found.received_bytes == 96 + 128


def test_cpus_are_refused(capsys):
    assert main(["--cases", "window_131k"]) == 2
    assert "needs two accelerators or more" in capsys.readouterr().err


def test_unknown_cases_are_refused(capsys):
    assert main(["--cases", "16x128"]) == 2
    assert "unknown cases 16x128" in capsys.readouterr().err
