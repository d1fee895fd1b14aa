"""The verdict, from what a program needs and what libtpu says of one that it refuses."""

import os
from types import SimpleNamespace

import jax
import pytest

from trainer.compile.fit import DeviceMemory, Fit, device_memory, parse_refusal
from trainer.compile.stages import MemoryReport, memory_report
from trainer.compile.topology.gpu import GPU_MODELS
from trainer.compile.topology.tpu import GENERATIONS

GIB = 2**30


EARLY = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (99.60G) exceeds "
    "available HBM (15.75G). HLO module: jit_train_step."
)
LATE = (
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 21.95G of 15.48G "
    "hbm.\n Exceeded hbm capacity by 6.47G.\n\nTotal hbm usage >= 22.47G:\n    reserved        530.00M"
)
ABORTED = (
    "RESOURCE_EXHAUSTED: Compilation failure: Aborting compilation early because it's unlikely to have enough memory. "
    "Requires 3.84T, has 90.96G available. If more detailed logging is desired, set --xla_x=-1"
)
SPARSE_CORE = (
    "RESOURCE_EXHAUSTED: TPU TensorCore Hbm usage: 34.82G, SparseCore Hbm usage 174.10G, exceeding available bytes: "
    "95.74G"
)


@pytest.mark.parametrize(
    ("message", "needed", "available"),
    [(EARLY, 99.6, 15.75), (LATE, 21.95, 15.48), (ABORTED, 3.84 * 1024, 90.96), (SPARSE_CORE, 34.82 + 174.1, 95.74)],
)
def test_refusals_are_read_to_the_byte(message, needed, available):
    fit = parse_refusal(message)
    assert (fit.needed, fit.available.size) == pytest.approx((needed * GIB, available * GIB), abs=1)
    assert fit.fits is False


def test_other_errors_are_no_refusal():
    for message in ("Ran out of memory in memory space vmem. Used 32.42M of 16.00M vmem.", "Unsupported", ""):
        assert parse_refusal(f"RESOURCE_EXHAUSTED: {message}") is None


def compiled_for(platform: str, *, peak: int = 150, **of_host: int):
    """What a compiled program shows of itself."""
    stats = {"argument": 100, "output": 90, "alias": 80, "temp": 1000, "generated_code": 5}
    stats |= {f"host_{name}": of_host.get(name, 0) for name in ("argument", "output", "alias", "temp")}
    fields = {f"{name}_size_in_bytes": size for name, size in stats.items()}
    sharding = SimpleNamespace(device_set=[SimpleNamespace(platform=platform)])
    analysis = SimpleNamespace(**fields, peak_memory_in_bytes=peak)
    return SimpleNamespace(memory_analysis=lambda: analysis, output_shardings=[sharding])


def test_a_program_needs_its_temporaries_or_on_tpus_what_libtpu_says_is_its_peak():
    assert memory_report(compiled_for("gpu")) == MemoryReport(100, 90, 80, 1000, 5, 100 + 90 - 80 + 1000 + 5)
    assert memory_report(compiled_for("tpu")) == MemoryReport(100, 90, 80, 40, 5, 150 + 5)


def test_what_the_host_holds_is_told_apart():
    state = {"argument": 400, "output": 400, "alias": 390}
    assert memory_report(compiled_for("gpu", **state, temp=50)).host == 410 + 50
    # libtpu's peak: the device's 110, the host's 410, and the larger of the two sorts of temporaries.
    on_tpu = memory_report(compiled_for("tpu", peak=110 + 410 + 40, **state))
    assert on_tpu == MemoryReport(100, 90, 80, 40, 5, 150 + 5, host=410)
    larger_on_host = memory_report(compiled_for("tpu", peak=110 + 410 + 7000, **state, temp=7000))
    assert larger_on_host == MemoryReport(100, 90, 80, 1000, 5, 1110 + 5, host=410 + 7000)
    larger_on_device = memory_report(compiled_for("tpu", peak=110 + 410 + 40, **state, temp=30))
    assert (larger_on_device.temporaries, larger_on_device.host) == (40, 440)


@pytest.mark.parametrize(
    ("needed", "available", "fits", "spare"),
    [(100, DeviceMemory(100, "x"), True, 0), (101, DeviceMemory(100, "x"), False, -1), (101, None, None, None)],
)
def test_the_verdict_at_the_boundary(needed, available, fits, spare):
    fit = Fit(needed, available)
    assert (fit.fits, fit.spare) == (fits, spare)
    assert Fit(needed, available, is_refused=True).fits is False, "whatever the estimate"


def test_cpu_devices_share_the_machine():
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    device = jax.local_devices(backend="cpu")[0]
    assert device_memory(device, 1) == DeviceMemory(total, "this machine's")
    assert device_memory(device, 8) == DeviceMemory(total // 8, "this machine's, shared by 8 devices")


def test_a_device_that_is_there_knows_its_limit():
    device = SimpleNamespace(platform="gpu", device_kind="NVIDIA X", memory_stats=lambda: {"bytes_limit": 123})
    source = "its runtime's limit, the share that XLA_PYTHON_CLIENT_MEM_FRACTION sets"
    assert device_memory(device, 4) == DeviceMemory(123, source)
    device = SimpleNamespace(platform="gpu", device_kind="NVIDIA X", memory_stats=lambda: None)
    assert device_memory(device, 4) is None


def test_every_generation_leaves_less_than_it_has_or_what_libtpu_says():
    for generation in GENERATIONS:
        device = SimpleNamespace(platform="tpu", device_kind=generation.device_kind, memory_stats=lambda: None)
        memory = device_memory(device, 1)
        assert memory is not None
        assert memory.size == round(generation.usable_gib * GIB)
        assert generation.memory_gib * 0.95 < generation.usable_gib < generation.memory_gib + 1
        assert f"{generation.name}, {generation.memory_gib:g} GiB" in memory.source


def test_a_gpu_of_a_topology_has_the_documented_memory():
    def refuse():
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: the device isn't there")

    for model in GPU_MODELS:
        device = SimpleNamespace(platform="gpu", device_kind=model.device_kind, memory_stats=refuse)
        assert device_memory(device, 8) == model.memory()
