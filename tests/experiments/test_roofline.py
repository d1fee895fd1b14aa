"""Lower bounds on an attention call's time, against sums made by hand."""

import pytest

from experiments.benchmarks.attention.cases import Case, make_problem
from experiments.benchmarks.attention.roofline import Roofline, roofline
from kernels import FullMask, LocalMask

H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(("device", "bytes_per_s"), [(H200, 4.8e12), (H100, 3.35e12)])
@pytest.mark.parametrize("measured", ["forward", "backward", "forward_backward"])
def test_a_call_moves_its_arguments_and_results_once(device, bytes_per_s, measured, rng):
    batch, queries, keys, kv_heads, group, head_dim, value_dim = rng.integers(1, 9, 7).tolist()
    case = Case(batch, queries, group * kv_heads, kv_heads, head_dim, FullMask(), kv_length=keys, value_dim=value_dim)
    found = roofline(make_problem(case), measured, device)
    rows, columns = batch * queries * group * kv_heads, batch * keys * kv_heads
    query, output, key, value = rows * head_dim, rows * value_dim, columns * head_dim, columns * value_dim
    # In 16 bits, but for lse.
    forward = 2 * (query + key + value + output)
    backward = 2 * (2 * query + 2 * key + 2 * value + 2 * output) + 4 * rows
    moved = {"forward": forward, "backward": backward, "forward_backward": forward + backward + 4 * rows}[measured]
    multiplied = rows * keys * (head_dim + value_dim) * 2 * {"forward": 1, "backward": 2.5}.get(measured, 3.5)
    assert found == pytest.approx(Roofline(multiplied / 989e12, moved / bytes_per_s))


def test_only_pairs_that_the_mask_allows_are_multiplied():
    case = Case(1, 64, 1, 1, 16, LocalMask(7, 0))
    found = roofline(make_problem(case), "forward", H200)
    assert found is not None
    pairs = sum(min(query + 1, 8) for query in range(64))
    assert found.matmuls_s == pytest.approx(4 * 16 * pairs / 989e12)


@pytest.mark.parametrize("device", ["cpu", "NVIDIA H100 NVL", "NVIDIA A100-SXM4-80GB"])
def test_of_other_devices_nothing_is_claimed(device):
    assert roofline(make_problem(Case(1, 8, 1, 1, 16, FullMask())), "forward", device) is None
