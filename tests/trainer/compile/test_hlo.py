"""Collectives are counted as often as they run, from a real program's text and from texts that show one thing each."""

import functools
import textwrap

import jax
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from trainer.compile.collectives import CollectiveTotal, count_collectives
from trainer.compile.hlo import parse_module

ADD = """
%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}
"""


def totals(text: str) -> dict[str, CollectiveTotal]:
    return {
        total.operation: total for total in count_collectives(parse_module("HloModule m\n" + textwrap.dedent(text)))
    }


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


def test_a_loop_counts_with_the_trips_that_xla_states():
    stated = 'backend_config={"known_trip_count":{"n":"7"},"known_init_step":{"init":"0","step":"1"}}, '
    assert totals(loop(backend_config=stated)) == {
        "all-reduce": CollectiveTotal("all-reduce", 2, 8, 40 + 7 * 400, True)
    }


@pytest.mark.parametrize(("step", "trips"), [(1, 12), (5, 3)])
def test_a_loop_that_counts_to_a_constant_needs_no_statement(step, trips):
    assert totals(loop(step=step))["all-reduce"] == CollectiveTotal("all-reduce", 2, 1 + trips, 40 + trips * 400, True)


def test_a_loop_of_unknown_trips_counts_once_and_says_so():
    assert totals(loop(limit="%unknown"))["all-reduce"] == CollectiveTotal("all-reduce", 2, 2, 440, False)


@pytest.mark.parametrize("trips", [0, 5])
def test_a_loop_of_unknown_trips_counts_as_many_as_are_given(trips):
    (total,) = count_collectives(parse_module(loop(limit="%unknown")), trips)
    assert total == CollectiveTotal("all-reduce", 2, 1 + trips, 40 + trips * 400, False)


def test_loops_in_loops_multiply():
    text = loop().replace("ENTRY %main", "%inner_main").replace("%body", "%inner_body")
    outer = loop().replace("%all-reduce.1 = f32[100]{0:T(128)} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add",
                           "%all-reduce.1 = f32[100]{0:T(128)} call(%x, %x), to_apply=%inner_main")  # fmt: skip
    assert totals(text + outer)["all-reduce"].count == 1 + 12 * (1 + 12)


def test_what_is_never_reached_counts_nothing():
    unreached = loop().replace("ENTRY %main", "%never")
    entry = "\nENTRY %main (p: f32[4]) -> f32[4] {\n  ROOT %p = f32[4] parameter(0)\n}\n"
    assert totals(unreached + entry) == {}


def entry(*instructions: str) -> str:
    lines = ["ENTRY %main (p: bf16[64,8]) -> f32[] {", "  %p = bf16[64,8]{1,0} parameter(0)"]
    return "\n".join([ADD, *lines, *(f"  {instruction}" for instruction in instructions), "}", ""])


@pytest.mark.parametrize(
    ("instructions", "kind", "num_bytes"),
    [
        # The larger side counts: the gathered one, and the one to be scattered.
        (["%g = bf16[256,8]{1,0} all-gather(%p), replica_groups=[2,4]<=[8], dimensions={0}"], "all-gather", 4096),
        (["%s = bf16[16,8] reduce-scatter(%p), replica_groups={{0,1,2,3}}, dimensions={0}"], "reduce-scatter", 1024),
        (
            [
                "%s = (bf16[64,8], bf16[256,8]) all-gather-start(%p), replica_groups=[1,4]<=[4]",
                "%d = bf16[256,8] all-gather-done(%s)",
            ],
            "all-gather",
            4096,
        ),
        (
            [
                "%s = ((bf16[64,8], bf16[64,8]), (bf16[256,8], bf16[256,8]), u32[]) all-gather-start(%p, %p)",
                "%d = (bf16[256,8], bf16[256,8]) all-gather-done(%s)",
            ],
            "all-gather",
            8192,
        ),
        (
            [
                "%s = bf16[64,8] all-reduce-start(%p), replica_groups={{0,1}}, to_apply=%add",
                "%d = bf16[64,8] all-reduce-done(%s)",
            ],
            "all-reduce",
            1024,
        ),
        (
            [
                "%s = (bf16[64,8], bf16[64,8], u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,1}}",
                "%d = bf16[64,8] collective-permute-done(%s)",
            ],
            "collective-permute",
            1024,
        ),
        (["%a = (bf16[32,8], bf16[32,8]) all-to-all(%p, %p), replica_groups={{0,1}}"], "all-to-all", 2048),
        (["%a = (f32[], pred[3]) all-reduce(%p, %p), replica_groups={}, to_apply=%add"], "all-reduce", 2048),
    ],
)
def test_every_form_counts_once_with_its_payload(instructions, kind, num_bytes):
    assert totals(entry(*instructions)) == {kind: CollectiveTotal(kind, 1, 1, num_bytes, True)}


@pytest.mark.parametrize(
    "attributes",
    [
        "replica_groups={{0},{1}}",
        "replica_groups=[8,1]<=[8]",
        "replica_groups=mesh['data'=1,'fsdp'=8,'tensor'=1] {'data','tensor'}",
    ],
)
def test_groups_of_one_device_send_nothing(attributes):
    assert totals(entry(f"%r = bf16[64,8] all-reduce(%p), {attributes}, to_apply=%add")) == {}
    assert totals(entry("%r = bf16[64,8] collective-permute(%p), source_target_pairs={{0,0},{1,1}}")) == {}


def test_a_group_along_a_named_axis_is_seen():
    among = "replica_groups=mesh['data'=1,'fsdp'=8], device_ids=([2,4]T(1,0)) {'fsdp'}"
    assert totals(entry(f"%r = bf16[64,8] all-reduce(%p), {among}, to_apply=%add"))["all-reduce"].count == 1


def test_a_generic_async_collective_counts_once():
    wrapped = """
%wrapped (w: bf16[64,8]) -> bf16[16,8] {
  %w = bf16[64,8] parameter(0)
  ROOT %s = bf16[16,8] reduce-scatter(%w), replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%add
}
"""
    start = "%a = ((bf16[64,8]), bf16[16,8], u32[]) async-start(%p), calls=%wrapped"
    done = "%b = bf16[16,8] async-done(%a), calls=%wrapped"
    assert totals(wrapped + entry(start, done)) == {
        "reduce-scatter": CollectiveTotal("reduce-scatter", 1, 1, 1024, True)
    }


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
    text = fused + link.format(1) + link.format(2)
    calls = [
        "%f = f32[16,8] fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1.clone",
        "%g1 = bf16[256,8] fusion(%p), kind=kCustom, calls=%async_collective_fusion.1",
        "%g2 = bf16[256,8] fusion(%g1), kind=kCustom, calls=%async_collective_fusion.2",
    ]
    assert totals(text + entry(*calls)) == {
        "all-gather": CollectiveTotal("all-gather", 1, 1, 4096, True),
        "reduce-scatter": CollectiveTotal("reduce-scatter", 1, 1, 2048, True),
    }


def kernel(name: str, scope: str, results: str, operands: str) -> str:
    """A Mosaic GPU kernel, as XLA writes it: semaphores are its last result and its last operand."""
    attributes = 'custom_call_target="mosaic_gpu_v2", output_to_operand_aliasing={{2}: (2, {})}'
    metadata = f'metadata={{op_name="jit(step)/{scope}/body/mpmd_map" stack_frame_id=3}}'
    call = f"%{name} = ({results}, s32[9]{{0}}) custom-call({operands}, %s)"
    return f'{call}, {attributes}, {metadata}, backend_config={{hash = "x"}}'


def test_kernels_in_which_gpus_reach_each_other_count_as_often_as_they_run():
    forward, backward = "jvp()/while/body/attention/shard_map", "transpose(jvp())/while/body/mlp/shard_map"
    tokens, product = "bf16[1,64,8]{2,1,0}", "bf16[1,64,24]{2,1,0}"
    gather = kernel("g", f"{forward}/all_gather_matmul", f"{product}, {tokens}", "%p, %m")
    scatter = kernel("r", f"{backward}/matmul_reduce_scatter", "bf16[1,32,8]{2,1,0}, bf16[1,32,8]{2,1,0}", "%h, %n")
    others = [
        f"%h = {product} get-tuple-element(%g), index=0",
        # Its scope is that of the kernel that it reads from.
        f'%c = {product} copy(%h), metadata={{op_name="jit(step)/{forward}/all_gather_matmul/body/mpmd_map"}}',
        f'%e = {product} custom-call(%h), custom_call_target="other", metadata={{op_name="all_gather_matmul/other"}}',
        kernel("k", f"{forward}/dot_product_attention", f"{product}, {tokens}", "%h, %n"),
        kernel("l", f"{forward}/all_gather_matmul_of_another_kind", f"{product}, {tokens}", "%h, %n"),
    ]
    carry = "(s32[], bf16[1,32,8], s32[9], bf16[8,24], bf16[24,8])"
    inner = [
        f"%carry = {carry} parameter(0)",
        "%i = s32[] get-tuple-element(%carry), index=0",
        "%p = bf16[1,32,8] get-tuple-element(%carry), index=1",
        "%s = s32[9] get-tuple-element(%carry), index=2",
        "%m = bf16[8,24] get-tuple-element(%carry), index=3",
        "%n = bf16[24,8] get-tuple-element(%carry), index=4",
        *(gather, *others, scatter),
        "%back = bf16[1,32,8] get-tuple-element(%r), index=0",
        f"ROOT %out = {carry} tuple(%i, %back, %s, %m, %n)",
    ]
    body = "\n".join([f"%body (carry: {carry}) -> {carry} {{", *(f"  {line}" for line in inner), "}", ""])
    main = f"""
%condition (carry: {carry}) -> pred[] {{
  %carry = {carry} parameter(0)
  ROOT %more = pred[] constant(true)
}}

ENTRY %main (init: {carry}) -> {carry} {{
  %init = {carry} parameter(0)
  ROOT %out = {carry} while(%init), condition=%condition, body=%body, backend_config={{"known_trip_count":{{"n":"7"}}}}
}}
"""
    # The tokens of both GPUs, [1, 64, 8] in bfloat16.
    assert totals(body + main) == {
        "all_gather_matmul": CollectiveTotal("all_gather_matmul", 1, 7, 7 * 1024, True),
        "matmul_reduce_scatter": CollectiveTotal("matmul_reduce_scatter", 1, 7, 7 * 1024, True),
    }


def test_a_sum_over_four_gpus_has_a_result_for_each_other_ones_rows():
    own = "bf16[1,32,8]{2,1,0}"
    scatter = kernel("r", "mlp/matmul_reduce_scatter", ", ".join([own] * 4), "%h")
    program = f"""
ENTRY %main (h: bf16[1,128,24], s: s32[9]) -> ({", ".join(["bf16[1,32,8]"] * 4)}, s32[9]) {{
  %h = bf16[1,128,24] parameter(0)
  %s = s32[9] parameter(1)
  ROOT {scatter}
}}
"""
    total = CollectiveTotal("matmul_reduce_scatter", 1, 1, 4 * 32 * 8 * 2, True)
    assert totals(program) == {"matmul_reduce_scatter": total}


def test_of_nested_scopes_the_innermost_names_the_kernel():
    nested = kernel("g", "transpose(jvp(matmul_reduce_scatter))/all_gather_matmul", "bf16[1,64,24], bf16[1,64,8]", "%p")
    program = f"""
ENTRY %main (p: bf16[1,32,8], s: s32[9]) -> (bf16[1,64,24], bf16[1,64,8], s32[9]) {{
  %p = bf16[1,32,8] parameter(0)
  %s = s32[9] parameter(1)
  ROOT {nested}
}}
"""
    assert totals(program) == {"all_gather_matmul": CollectiveTotal("all_gather_matmul", 1, 1, 1024, True)}


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
    inner = branch("one_way", 60) + branch("other_way", 61) + nested
    text = f"""{ADD}{inner}{branch("small", 10)}{branch("large", 100)}
ENTRY %main (i: s32[], p: f32[10], q: f32[100], r: f32[50]) -> f32[10] {{
  %i = s32[] parameter(0)
  %p = f32[10] parameter(1)
  %q = f32[100] parameter(2)
  %r = f32[50] parameter(3)
  ROOT %one = f32[10] conditional(%i, %p, %q, %r), branch_computations={{%small, %large, %nested}}
}}
"""
    assert totals(text) == {"all-reduce": CollectiveTotal("all-reduce", 1, 1, 400, True)}
