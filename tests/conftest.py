"""What every test shares: eight CPU devices, the run's seed, the skip of what can't run here, and bounded memory."""

import collections
import gc
import os
import signal
import time

from tests.host_cpus import NUM_DEVICES, xla_flags
from trainer.hardware import expected_platform

# Several test processes share one accelerator; each would otherwise claim most of its memory at its first array.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Pallas's GPU interpreter keeps a thread of XLA's pool waiting for each of a kernel's: with few cores, all of them.
os.environ.setdefault("PJRT_NPROC", "16")
# Where no accelerator is to be seen, JAX need not look for one: libtpu, which is here to compile, would complain.
if expected_platform() == "cpu":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", xla_flags())
    # Triton reads this when it is imported: its kernels then run on the host.
    os.environ.setdefault("TRITON_INTERPRET", "1")
elif expected_platform() == "gpu":
    # To time XLA's own kernels, of which a reference runs each once, would take half of a GPU test.
    os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")
# Tests trace and lower many small programs. The Python call stack of each operation, which only HLO metadata shows,
# would take a fifteenth of that time.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

import hypothesis
import jax
import numpy as np
import pytest

from tests.seeds import run_seed, seeded_rng
from trainer.hardware import resident_bytes

# The first example of a test compiles, so a deadline per example would measure XLA.
hypothesis.settings.register_profile("flax-longcontext", deadline=None, print_blob=True)
hypothesis.settings.load_profile("flax-longcontext")


_STARTED = time.monotonic()

# Tracing allocates many small objects: at Python's default thresholds the collector would take a tenth of the time.
gc.set_threshold(200_000, 20, 100)


def pytest_collection_finish():
    """What is imported by now stays, so the collector need not visit it again."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser):
    parser.addoption("--num-kills", type=int, default=4, help="SIGKILLs of a run that has to end as if without them")
    parser.addoption("--rng-seed", type=int, help="seed of all random draws (default: a fresh one, shown at the top)")
    parser.addoption("--minutes", type=float, help="after this time the remaining tests are skipped")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Before any test module is imported, as some draw then; and before hypothesis looks for its seed."""
    seed = run_seed(config.getoption("rng_seed"))
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(seed)


def pytest_report_header():
    return f"all random draws of this run: --rng-seed {run_seed()}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks what a `sample` leaves out as `full`, before pytest selects by markers."""
    cases = collections.defaultdict(list)
    for item in items:
        if (sample := item.get_closest_marker("sample")) is not None:
            cases[item.path, item.originalname, sample.args[0]].append(item)
    for (path, name, count), some in cases.items():
        for left_out in seeded_rng(f"{path.name}::{name}").permutation(len(some))[count:]:
            some[left_out].add_marker("full")
    if config.getoption("minutes") is not None:  # a part of the tests, another one each time
        seeded_rng("order").shuffle(items)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu"):
        device_kind = jax.devices()[0].device_kind
        if not device_kind.startswith("NVIDIA"):
            pytest.skip(f"needs an NVIDIA GPU that JAX can use; JAX's default device here is {device_kind!r}")
    if item.get_closest_marker("jax_0_11") and jax.__version_info__ < (0, 11):
        pytest.skip(f"needs JAX 0.11, as Mosaic GPU's kernels do; this is {jax.__version__}")
    minutes = item.config.getoption("minutes")
    if minutes is not None and time.monotonic() - _STARTED > 60 * minutes:
        pytest.skip(f"--minutes {minutes} are over")


def pytest_runtest_teardown(item, nextitem):
    """Forgets a module's compiled programs once they fill memory: a worker of all tests would grow to 5 GB."""
    if (nextitem is None or nextitem.path != item.path) and (resident_bytes() or 0) > 2e9:
        jax.clear_caches()


@pytest.fixture
def eight_devices():
    """For tests of meshes: skips them where JAX doesn't have eight CPU devices."""
    if jax.default_backend() != "cpu" or jax.device_count() < NUM_DEVICES:
        pytest.skip(f"needs {NUM_DEVICES} CPU devices, which there are with JAX_PLATFORMS=cpu and no XLA_FLAGS")


@pytest.fixture
def heeds_sighup():
    """Within the test, this process and those that it starts don't ignore SIGHUP, as all do under `nohup pytest`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def float64():
    """JAX takes 64-bit types within the test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def rng(request) -> np.random.Generator:
    """A generator of fresh inputs. A failure's report shows the command-line option that brings them back."""
    print(f"Inputs of this test: --rng-seed {run_seed()}")
    return seeded_rng(request.node.nodeid)
