"""The throughput benchmark: its workloads, where it says a step's time goes, and what it refuses."""

import collections
import dataclasses
import io
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.profiler import ProfileData
from rich.console import Console

from experiments.benchmarks.train_throughput import breakdown, measure
from experiments.benchmarks.train_throughput.__main__ import ThroughputArguments, main
from experiments.benchmarks.train_throughput.breakdown import TracedKernel, break_down, part_of
from experiments.benchmarks.train_throughput.report import breakdown_table, read_baselines, throughput_table
from experiments.benchmarks.train_throughput.workloads import WORKLOADS, Workload
from trainer.compile.hlo import parse_module
from trainer.config import MeshConfig
from trainer.errors import UserMistake
from trainer.step.functions import make_step_functions
from trainer.step.sharding import make_mesh

# Of Llamas and Qwen: the published models'. The plain ones have two matrices of each three in the MLP.
NUM_PARAMETERS = {
    "gpt_32k": 123_587_328,
    "gpt_1b_32k": 1_336_248_320,
    "124m": 124e6,
    "124m_window": 124e6,
    "1b": 1.31e9,
}
NUM_PARAMETERS |= {"llama_1b": 1_235_814_400, "plain_llama_1b": 1_235_814_400 - 16 * 2048 * 8192}
NUM_PARAMETERS |= {"llama_8b": 8_030_261_248, "qwen3_4b": 4_022_468_096}
NUM_PARAMETERS["plain_qwen3_4b"] = NUM_PARAMETERS["qwen3_4b"] - 36 * 2560 * 9728
TINY = Workload("124m", 128, document_length=24, num_batches=2, num_windows=2, steps_per_window=1)


def tiny_config(**changes):
    config = TINY.config()
    sizes = {"vocab_size": 256, "num_layers": 2, "width": 32, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16}
    return dataclasses.replace(config, model=dataclasses.replace(config.model, mlp_width=64, **(sizes | changes)))


def test_pages_and_gpt2s_differ_in_the_mlp_alone():
    """nanoGPT, which the latter are compared with, has GPT-2's.

    Of 1.3B parameters a SwiGLU of exactly as many would be no multiple of 256 features wide.
    """
    for page, gpt2, sizes in (
        ("gpt_32k", "124m_32k", (123_587_328, 123_587_328)),
        ("gpt_1b_32k", "1b_32k", (1_336_248_320, 1_311_082_496)),
    ):
        one, other = WORKLOADS[page].config(), WORKLOADS[gpt2].config()
        assert (one.model.mlp, other.model.mlp, other.model.mlp_width) == ("swiglu", "gelu", 4 * other.model.width)
        assert dataclasses.replace(one.model, mlp="gelu", mlp_width=other.model.mlp_width) == other.model
        assert (one.model.num_parameters, other.model.num_parameters) == sizes
        assert one.sequence_length == other.sequence_length == 32_768
        assert (WORKLOADS[page].peer is None, WORKLOADS[gpt2].peer is None) == (True, False)


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_is_a_config_with_batches_of_its_length(rng, name):
    workload = WORKLOADS[name]
    config = workload.config()
    assert config.data.keep_documents_apart is (workload.document_length is not None)
    assert config.model.num_parameters == pytest.approx(NUM_PARAMETERS[workload.model], rel=0.01)
    lengths = workload.document_lengths(rng)
    assert sum(lengths) == config.sequence_length == workload.sequence_length
    assert min(lengths) >= 1


def test_document_lengths_are_log_normal_around_the_median(rng):
    lengths = dataclasses.replace(TINY, sequence_length=2_000_000, document_length=1000).document_lengths(rng)[:-1]
    assert np.median(lengths) == pytest.approx(1000, rel=0.2)
    assert np.std(np.log(lengths)) == pytest.approx(0.5, rel=0.2)


def test_a_batch_is_packed_documents(rng):
    batch = TINY.batch(256, rng)
    starts = np.flatnonzero(batch["positions"][0] == 0)
    np.testing.assert_array_equal(starts[::-1], np.unique(batch["segment_ids"][0], return_index=True)[1])
    np.testing.assert_array_equal(batch["targets"][0, :-1], batch["tokens"][0, 1:])
    assert {name: array.shape for name, array in batch.items()} == dict.fromkeys(batch, (1, 128))


def test_a_workload_is_measured(rng):
    row = measure.measure("tiny", TINY, tiny_config(), trace=False)
    assert json.loads(json.dumps(row)) == row
    assert row["tokens_per_s"] == pytest.approx(128 / row["step_s"])
    assert row["fastest_step_s"] <= row["step_s"] <= row["slowest_step_s"]
    assert row["num_documents"] >= 2
    assert row["mfu_causal"] is row["mfu_noncausal"] is None, "no vendor tells a CPU's peak"
    assert row["loss"] == pytest.approx(np.log(256), rel=0.1)
    assert row["breakdown"] is None
    assert row["loss_implementation"] == "xla"
    table = rendered(throughput_table([row], {"tiny": row["tokens_per_s"] / 2}))
    assert re.search(r"tiny .* 2\.000 ", table)


def test_a_workload_is_told_how_to_run():
    given = {"chunk_size": 64, "remat": "none", "exchange": "ring", "collectives": "xla", "loss_implementation": "xla"}
    config = measure.override(tiny_config(), mesh={"data": 2, "fsdp": 2}, implementation=None, **given)
    assert config.batch_size == 4
    assert config.mesh == MeshConfig(data=2, fsdp=2)
    found = (config.loss.chunk_size, config.model.remat, config.context.exchange, config.tensor.collectives)
    assert (*found, config.loss.implementation) == tuple(given.values())


@pytest.fixture(scope="module")
def step_module():
    """The HLO of a small step, its layers in a loop."""
    functions = make_step_functions(tiny_config(scan_layers=True, remat="none"), make_mesh(MeshConfig()))
    compiled = functions.train_step.lower(functions.abstract_state, functions.abstract_batch).compile()
    return parse_module(compiled.as_text())


def instructions_of(module):
    return [op for computation in module.computations.values() for op in computation.instructions.values()]


def test_every_part_of_a_step_is_found_by_its_scope(step_module):
    found = collections.defaultdict(list)
    for instruction in instructions_of(step_module):
        found[part_of(instruction, step_module)].append(instruction.op_name)
    attention = "attention forward", "attention backward"
    assert {*attention, "loss", "optimizer", "matmuls", "norms and elementwise"} <= set(found)
    assert all("dot_product_attention" in op for part in attention for op in found[part])
    assert not any("transpose(" in op for op in found["attention forward"])
    assert all("transpose(" in op for op in found["attention backward"])
    assert all("loss" in op for op in found["loss"])
    assert not any(re.search(r"dot_product_attention|\bloss\b|optimizer", op) for op in found["matmuls"])


def test_a_kernel_that_sends_while_it_multiplies_is_a_matmul():
    scopes = "jit(f)/transpose(jvp(mlp))/matmul_reduce_scatter", "jit(f)/all_gather_matmul", "jit(f)/mlp"
    call = '%call.{} = bf16[8,8] custom-call(%x), custom_call_target="mosaic_gpu_v2", metadata={{op_name="{}"}}'
    calls = [call.format(number, scope) for number, scope in enumerate(scopes)]
    body = ["%x = bf16[8,8] parameter(0)", *calls, "ROOT %y = bf16[8,8] copy(%call.2)"]
    lines = ["HloModule m", "ENTRY %main (x: bf16[8,8]) -> bf16[8,8] {", *(f"  {line}" for line in body), "}"]
    module = parse_module("\n".join(lines))
    instructions = module.computations[module.entry].instructions
    parts = [part_of(instructions[f"call.{i}"], module) for i in range(3)]
    assert parts == ["matmuls", "matmuls", "norms and elementwise"]


def test_copies_are_told_from_arithmetic():
    def program(x):
        with jax.named_scope("mlp"):
            return jnp.concatenate([x.T, x.T[::-1]]).astype(jnp.bfloat16), jnp.tanh(x)

    module = parse_module(jax.jit(program).lower(jnp.ones((64, 32))).compile().as_text())
    parts = {part_of(op, module) for op in instructions_of(module) if op.opcode == "fusion"}
    assert parts <= {"copies and transposes", "norms and elementwise"}
    assert "norms and elementwise" in parts


def test_a_trace_is_summed_by_part_and_its_gaps_are_idle(step_module):
    parts = {part_of(op, step_module): op for op in instructions_of(step_module)}
    loss, optimizer = parts["loss"], parts["optimizer"]
    # Two steps: 1 ms of loss by the instruction's name, 0.5 ms of the optimizer by the kernel's, 0.25 ms overlapping,
    # and a copy after a gap of 2 ms.
    kernels = []
    for start in (0.0, 10e6):
        kernels += [
            TracedKernel("a", loss.name, start, start + 1e6),
            TracedKernel(re.sub(r"\W", "_", optimizer.name), None, start + 0.75e6, start + 1.25e6),
            TracedKernel("Memcpy D2D", None, start + 3.25e6, start + 3.75e6),
        ]
    result = break_down(kernels, step_module, num_steps=2)
    shown = {part: ms for part, ms in result.parts.items() if ms}
    assert shown == pytest.approx({"loss": 1.0, "optimizer": 0.5, "copies and transposes": 0.5})
    # 2 ms in each step, and 6.25 ms between the two.
    assert result.idle == pytest.approx((2 + 2 + 6.25) / 2)
    assert result.kernels[0] == ("a", "loss", loss.op_name, 1.0, 1.0)
    row = {"workload": "tiny", "breakdown": result.to_json() | {"traced_step_s": 0.01}}
    assert re.search(r"loss +│ +1\.00", rendered(breakdown_table([row])))


def test_kernels_are_read_from_the_streams_of_the_first_gpu(tmp_path):
    space = """
        planes { name: "/device:GPU:0"
          event_metadata { key: 1 value { id: 1 name: "loop_fusion" } }
          event_metadata { key: 2 value { id: 2 name: "gemm" } }
          stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
          lines { name: "Stream #14(Compute)" timestamp_ns: 100
            events { metadata_id: 2 offset_ps: 9000 duration_ps: 2000 }
            events { metadata_id: 1 offset_ps: 1000 duration_ps: 3000 stats { metadata_id: 1 str_value: "loop.1" } }
          }
          lines { name: "XLA Ops" events { metadata_id: 1 offset_ps: 1000 duration_ps: 3000 } }
        }
        planes { name: "/host:CPU" lines { name: "Stream" events { metadata_id: 1 } } }
    """
    (tmp_path / "x.xplane.pb").write_bytes(ProfileData.text_proto_to_serialized_xspace(space))
    first, second = breakdown.read_kernels(tmp_path)
    assert (first.name, first.instruction, first.stop_ns - first.start_ns) == ("loop_fusion", "loop.1", 3)
    assert (second.name, second.instruction, second.start_ns - first.start_ns) == ("gemm", None, 8)


def test_the_best_run_of_a_tag_is_the_baseline(tmp_path):
    path = tmp_path / "nanogpt.jsonl"
    path.write_text("".join(json.dumps({"tag": "gpt2_124m_32k", "tok_s": speed}) + "\n" for speed in (100, 300, 200)))
    assert read_baselines(path) == {"gpt2_124m_32k": 300}
    arguments = ThroughputArguments(workloads=("124m_32k", "1b_32k", "124m_32k_packed"), baseline=path)
    assert arguments.baselines() == {"124m_32k": 300, "124m_32k_packed": 300}
    path.write_text("{}")
    with pytest.raises(UserMistake, match="expected lines of JSON such as"):
        read_baselines(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workloads", "124m_33k"], "unknown workloads 124m_33k; expected some of gpt_32k"),
        ([], "measures accelerators, but only CPUs are to be seen"),
    ],
)
def test_refusals(arguments, message, monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def rendered(table) -> str:
    output = io.StringIO()
    Console(width=160, file=output).print(table)
    return output.getvalue()
