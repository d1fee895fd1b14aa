"""Collectives are counted as often as they run, from a real program's text and from texts that show one thing each."""

import functools
import textwrap
from dataclasses import astuple

import jax
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from trainer.compile.collectives import count_collectives
from trainer.compile.hlo import parse_module

ADD = """
%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}
"""


def totals(text: str, unknown_trips: int | None = None) -> dict[str, tuple[int, int, int, bool]]:
    """By operation: instructions, times that they run, bytes, and whether that is exact."""
    module = parse_module("HloModule m\n" + textwrap.dedent(text))
    given = () if unknown_trips is None else (unknown_trips,)
    return {total.operation: astuple(total)[1:] for total in count_collectives(module, *given)}


def loop(limit: str = "%limit", step: int = 1, backend_config: str = "") -> str:
    """A module whose entry runs an all-reduce of 40 bytes, and one of 400 bytes in a loop."""
    return f"""
%body (carry.1: (s32[], f32[100])) -> (s32[], f32[100]) {{
  %carry.1 = (s32[]{{:T(128)}}, f32[100]{{0:T(128)}}) parameter(0)
  %i = s32[] get-tuple-element(%carry.1), index=0
  %i.copy = s32[] copy(%i)
  %step = s32[] constant({step})
  %next = s32[] add(%i.copy, %step), metadata={{op_name="jit(f)/while/body/add"}}
  %x = f32[100]{{0:T(128)}} get-tuple-element(%carry.1), index=1
  %all-reduce.1 = f32[100]{{0:T(128)}} all-reduce(%x), replica_groups={{{{0,1}}}}, to_apply=%add
  ROOT %out = (s32[], f32[100]) tuple(%next, %all-reduce.1)
}}

%condition (carry.2: (s32[], f32[100])) -> pred[] {{
  %limit = s32[]{{:T(128)}} constant(12)
  %carry.2 = (s32[], f32[100]) parameter(0)
  %unknown = s32[] get-tuple-element(%carry.2), index=0
  %j = s32[] get-tuple-element(%carry.2), index=0
  ROOT %lt = pred[]{{:T(512)}} compare(%j, {limit}), direction=LT
}}
{ADD}
ENTRY %main (p: f32[100], q: f32[10]) -> f32[100] {{
  %p = f32[100] parameter(0)
  %q = f32[10] parameter(1)
  %all-reduce.2 = f32[10] all-reduce(%q), replica_groups={{{{0,1}}}}, to_apply=%add
  %zero = s32[] constant(0)
  %start = s32[] copy(%zero)
  %init = (s32[], f32[100], /*index=5*/f32[10]) tuple(%start, %p, %all-reduce.2)
  %while = (s32[], f32[100]) while(%init), condition=%condition, body=%body, {backend_config}metadata={{}}
  ROOT %result = f32[100] get-tuple-element(%while), index=1
}}
"""


STATED = 'backend_config={"known_trip_count":{"n":"7"},"known_init_step":{"init":"0","step":"1"}}, '


@pytest.mark.parametrize(
    ("of_loop", "given", "trips", "is_exact"),
    [
        ({"backend_config": STATED}, None, 7, True),
        ({}, None, 12, True),
        ({"step": 5}, None, 3, True),
        ({"limit": "%unknown"}, None, 1, False),
        ({"limit": "%unknown"}, 0, 0, False),
        ({"limit": "%unknown"}, 5, 5, False),
    ],
)
def test_a_loop_counts_with_its_trips(of_loop, given, trips, is_exact):
    assert totals(loop(**of_loop), given) == {"all-reduce": (2, 1 + trips, 40 + trips * 400, is_exact)}


def test_loops_in_loops_multiply():
    text = loop().replace("ENTRY %main", "%inner_main").replace("%body", "%inner_body")
    outer = loop().replace("%all-reduce.1 = f32[100]{0:T(128)} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add",
                           "%all-reduce.1 = f32[100]{0:T(128)} call(%x, %x), to_apply=%inner_main")  # fmt: skip
    assert totals(text + outer)["all-reduce"][1] == 1 + 12 * (1 + 12)


def entry(*instructions: str, **parameters: str) -> str:
    """A module whose entry has these instructions, on parameters of these shapes."""
    shapes = parameters or {"p": "bf16[64,8]{1,0}"}
    lines = [f"  %{name} = {shape} parameter({number})" for number, (name, shape) in enumerate(shapes.items())]
    lines += [f"  {instruction}" for instruction in instructions]
    return "\n".join([ADD, "ENTRY %main (p: bf16[64,8]) -> f32[] {", *lines, "}", ""])


def test_what_is_never_reached_counts_nothing():
    assert totals(loop().replace("ENTRY %main", "%never") + entry()) == {}


@pytest.mark.parametrize(
    ("instruction", "kind", "num_bytes"),
    [
        # The larger side counts: the gathered one, and the one to be scattered.
        ("bf16[256,8]{1,0} all-gather(%p), replica_groups=[2,4]<=[8], dimensions={0}", "all-gather", 4096),
        ("bf16[16,8] reduce-scatter(%p), replica_groups={{0,1,2,3}}, dimensions={0}", "reduce-scatter", 1024),
        ("(bf16[64,8], bf16[256,8]) all-gather-start(%p), replica_groups=[1,4]<=[4]", "all-gather", 4096),
        (
            "((bf16[64,8], bf16[64,8]), (bf16[256,8], bf16[256,8]), u32[]) all-gather-start(%p, %p)",
            "all-gather",
            8192,
        ),
        ("bf16[64,8] all-reduce-start(%p), replica_groups={{0,1}}, to_apply=%add", "all-reduce", 1024),
        (
            "(bf16[64,8], bf16[64,8], u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,1}}",
            "collective-permute",
            1024,
        ),
        ("(bf16[32,8], bf16[32,8]) all-to-all(%p, %p), replica_groups={{0,1}}", "all-to-all", 2048),
        ("(f32[], pred[3]) all-reduce(%p, %p), replica_groups={}, to_apply=%add", "all-reduce", 2048),
        # A group along a named axis.
        (
            "bf16[64,8] all-reduce(%p), replica_groups=mesh['b'=8], device_ids=([2,4]T(1,0)) {'b'}, to_apply=%add",
            "all-reduce",
            1024,
        ),
    ],
)
def test_every_form_counts_once_with_its_payload(instruction, kind, num_bytes):
    done = [f"%d = bf16[256,8] {kind}-done(%s)"] if "-start" in instruction else []
    assert totals(entry(f"%s = {instruction}", *done)) == {kind: (1, 1, num_bytes, True)}


@pytest.mark.parametrize(
    "instruction",
    [
        "all-reduce(%p), replica_groups={{0},{1}}, to_apply=%add",
        "all-reduce(%p), replica_groups=[8,1]<=[8], to_apply=%add",
        "all-reduce(%p), replica_groups=mesh['data'=1,'fsdp'=8,'tensor'=1] {'data','tensor'}, to_apply=%add",
        "collective-permute(%p), source_target_pairs={{0,0},{1,1}}",
    ],
)
def test_groups_of_one_device_send_nothing(instruction):
    assert totals(entry(f"%r = bf16[64,8] {instruction}")) == {}


def test_a_generic_async_collective_counts_once():
    wrapped = """
%wrapped (w: bf16[64,8]) -> bf16[16,8] {
  %w = bf16[64,8] parameter(0)
  ROOT %s = bf16[16,8] reduce-scatter(%w), replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%add
}
"""
    start = "%a = ((bf16[64,8]), bf16[16,8], u32[]) async-start(%p), calls=%wrapped"
    done = "%b = bf16[16,8] async-done(%a), calls=%wrapped"
    assert totals(wrapped + entry(start, done)) == {"reduce-scatter": (1, 1, 1024, True)}


def test_libtpus_reduce_scatter_fusion_and_its_chains_of_fusions():
    fused = """
%all-reduce-scatter.1.clone (input: f32[64,8]) -> f32[16,8] {
  %input = f32[64,8]{1,0:T(8,128)S(1)} parameter(0)
  %r = f32[64,8]{1,0:T(8,128)} all-reduce(%input), replica_groups={{0,1,2,3}}, to_apply=%add
  %zero = u32[] constant(0)
  ROOT %slice = f32[16,8] dynamic-slice(%r, %zero, %zero), dynamic_slice_sizes={16,8}
}
"""
    link = """
%async_collective_fusion.{} (i: bf16[64,8]) -> bf16[256,8] {{
  %i = bf16[64,8] parameter(0)
  ROOT %g = bf16[256,8] all-gather(%i), replica_groups={{{{0,1,2,3}}}}, frontend_attributes={{chain_id="3"}}
}}
"""
    calls = [
        "%f = f32[16,8] fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1.clone",
        "%g1 = bf16[256,8] fusion(%p), kind=kCustom, calls=%async_collective_fusion.1",
        "%g2 = bf16[256,8] fusion(%g1), kind=kCustom, calls=%async_collective_fusion.2",
    ]
    found = totals(fused + link.format(1) + link.format(2) + entry(*calls))
    assert found == {"all-gather": (1, 1, 4096, True), "reduce-scatter": (1, 1, 2048, True)}


def kernel(name: str, scope: str, results: str, operands: str) -> str:
    """A Mosaic GPU kernel, as XLA writes it: semaphores are its last result and its last operand."""
    attributes = 'custom_call_target="mosaic_gpu_v2", output_to_operand_aliasing={{2}: (2, {})}'
    metadata = f'metadata={{op_name="jit(step)/{scope}/body/mpmd_map" stack_frame_id=3}}'
    call = f"%{name} = ({results}, s32[9]{{0}}) custom-call({operands}, %s)"
    return f'{call}, {attributes}, {metadata}, backend_config={{hash = "x"}}'


GATHER, TOKENS, PRODUCT = "jvp()/body/attention/all_gather_matmul", "bf16[1,64,8]{2,1,0}", "bf16[1,64,24]{2,1,0}"
OWN = "bf16[1,32,8]{2,1,0}"


@pytest.mark.parametrize(
    ("instructions", "expected"),
    [
        (
            [
                kernel("g", GATHER, f"{PRODUCT}, {TOKENS}", "%p, %m"),
                f"%h = {PRODUCT} get-tuple-element(%g), index=0",
                # Its scope is that of the kernel that it reads from.
                f'%c = {PRODUCT} copy(%h), metadata={{op_name="jit(step)/{GATHER}/body/mpmd_map"}}',
                f'%e = {PRODUCT} custom-call(%h), custom_call_target="x", metadata={{op_name="all_gather_matmul/x"}}',
                kernel("k", "jvp()/dot_product_attention", f"{PRODUCT}, {TOKENS}", "%h, %m"),
                kernel("l", f"{GATHER}_of_another_kind", f"{PRODUCT}, {TOKENS}", "%h, %m"),
                kernel("r", "transpose(jvp())/mlp/matmul_reduce_scatter", f"{OWN}, {OWN}", "%h, %m"),
            ],
            # The tokens of both GPUs, [1, 64, 8] in bfloat16.
            {"all_gather_matmul": (1, 1, 1024, True), "matmul_reduce_scatter": (1, 1, 1024, True)},
        ),
        (  # Of four GPUs, a result for each other one's rows.
            [kernel("r", "mlp/matmul_reduce_scatter", ", ".join([OWN] * 4), "%p")],
            {"matmul_reduce_scatter": (1, 1, 4 * 32 * 8 * 2, True)},
        ),
        (  # Of nested scopes, the innermost names the kernel.
            [kernel("g", "transpose(jvp(matmul_reduce_scatter))/all_gather_matmul", f"{PRODUCT}, {TOKENS}", "%p")],
            {"all_gather_matmul": (1, 1, 1024, True)},
        ),
    ],
)
def test_kernels_in_which_gpus_reach_each_other_are_collectives(instructions, expected):
    assert totals(entry(*instructions, p=OWN, s="s32[9]", m="bf16[8,24]")) == expected


@pytest.mark.usefixtures("eight_devices")
def test_a_program_of_eight_devices(rng):
    rows, width, trips = 2 * int(rng.integers(3, 20)), int(rng.integers(3, 50)), int(rng.integers(3, 30))
    mesh = jax.make_mesh((4, 2), ("a", "b"), (AxisType.Auto,) * 2, devices=jax.devices()[:8])

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("a"), out_specs=P("a"), check_vma=False)
    def step(x):
        def body(x, _):
            x = lax.ppermute(x, "a", [(i, (i + 1) % 4) for i in range(4)])
            x = lax.psum(x, "b")
            gathered = lax.all_gather(x, "a", axis=0, tiled=True)
            return lax.psum_scatter(2 * gathered, "a", scatter_dimension=0, tiled=True), None

        x, _ = lax.scan(body, x, None, length=trips)
        return lax.all_to_all(x, "b", 0, 0, tiled=True)

    text = step.lower(jax.ShapeDtypeStruct((4 * rows, width), "float32")).compile().as_text()
    module = parse_module(text)
    assert module.num_instructions == sum(" = " in line and line.startswith("  ") for line in text.splitlines())
    shard = 4 * rows * width
    expected = {
        "all-gather": (trips, trips * 4 * shard),
        "all-reduce": (trips, trips * shard),
        "reduce-scatter": (trips, trips * 4 * shard),
        "all-to-all": (1, shard),
        "collective-permute": (trips, trips * shard),
    }
    counted = count_collectives(module)
    assert {total.operation: (total.count, total.bytes) for total in counted} == expected
    assert all(total.is_exact for total in counted)


def test_of_a_conditionals_branches_the_one_that_moves_most_counts():
    def branch(name: str, size: int) -> str:
        return f"""
%{name} (x.{size}: f32[{size}]) -> f32[{size}] {{
  %x.{size} = f32[{size}] parameter(0)
  ROOT %all-reduce.{size} = f32[{size}] all-reduce(%x.{size}), replica_groups={{{{0,1}}}}, to_apply=%add
}}
"""

    # Its two branches together have more than the largest, but only one of them runs.
    nested = """
%nested (y: f32[60]) -> f32[60] {
  %y = f32[60] parameter(0)
  %j = s32[] constant(0)
  ROOT %either = f32[60] conditional(%j, %y, %y), branch_computations={%one_way, %other_way}
}
"""
    branches = branch("small", 10) + branch("large", 100) + branch("one_way", 60) + branch("other_way", 61) + nested
    choice = "%one = f32[10] conditional(%i, %p, %q, %r), branch_computations={%small, %large, %nested}"
    text = branches + entry(choice, i="s32[]", p="f32[10]", q="f32[100]", r="f32[50]")
    assert totals(text) == {"all-reduce": (1, 1, 400, True)}
