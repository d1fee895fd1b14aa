"""Safetensors files are read slice by slice, and those that lie about themselves are refused."""

from __future__ import annotations

import os

import ml_dtypes
import numpy as np
import pytest

from layers.pretrained import safetensors_file
from layers.pretrained.safetensors_file import SafetensorsFile, whole
from tests.layers.pretrained.samples import entry, file_bytes, random_index

DTYPES = {"F32": np.float32, "F64": np.float64, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "U8": np.uint8}


@pytest.mark.parametrize(("chunk_bytes", "run_bytes"), [(1, 8), (100, 1), (1 << 20, 8), (1 << 20, 1 << 16)])
def test_any_slice_of_any_tensor_is_read(chunk_bytes, run_bytes, tmp_path, rng, monkeypatch):
    monkeypatch.setattr(safetensors_file, "_CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(safetensors_file, "_RUN_BYTES", run_bytes)
    arrays, header, data = {}, {"__metadata__": {"format": "pt"}}, b""
    for name, dtype in DTYPES.items():
        for num_dims in range(4):
            array = rng.integers(0, 256, rng.integers(1, 7, num_dims)).astype(dtype)
            arrays[f"{name}{num_dims}"] = array
            stop = len(data) + array.nbytes
            header[f"{name}{num_dims}"] = {
                "dtype": name,
                "shape": list(array.shape),
                "data_offsets": [len(data), stop],
            }
            data += array.tobytes()
    (path := tmp_path / "file.safetensors").write_bytes(file_bytes(header, data))
    preadv, reads = os.preadv, []

    def watched(descriptor, buffers, offset):
        reads.append((offset, offset + sum(len(buffer) for buffer in buffers)))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", watched)
    with SafetensorsFile(path) as file:
        assert file.tensors.keys() == arrays.keys()
        assert max(reads)[1] == path.stat().st_size - len(data), "the header alone has been read"
        for name, array in arrays.items():
            tensor = file.tensors[name]
            assert (tensor.shape, tensor.dtype) == (array.shape, array.dtype)
            for index in [whole(array.shape), *(random_index(rng, array.shape) for _ in range(10))]:
                reads.clear()
                np.testing.assert_array_equal(tensor.read(index), array[index])
                assert all(tensor.offset <= first <= last <= tensor.offset + array.nbytes for first, last in reads)


def test_long_runs_are_read_without_what_lies_between_them(tmp_path, rng, monkeypatch):
    array = rng.integers(0, 256, (4, 8, 1 << 13)).astype(np.uint8)
    header = {"experts": {"dtype": "U8", "shape": array.shape, "data_offsets": [0, array.nbytes]}}
    (path := tmp_path / "file.safetensors").write_bytes(file_bytes(header, array.tobytes()))
    with SafetensorsFile(path) as file:
        reads = []
        read_into = file.read_into
        monkeypatch.setattr(file, "read_into", lambda out, offset: reads.append(out.nbytes) or read_into(out, offset))
        index = (slice(1, 4), slice(0, 8), slice(0, 1 << 13))
        np.testing.assert_array_equal(file.tensors["experts"].read(index), array[index])
        assert reads == [3 << 16]
        reads.clear()
        monkeypatch.setattr(safetensors_file, "_RUN_BYTES", 1 << 14)
        index = (slice(1, 4), slice(3, 5), slice(0, 1 << 13))
        np.testing.assert_array_equal(file.tensors["experts"].read(index), array[index])
        assert reads == [1 << 14] * 3


LIES = {
    "an empty file": (b"", "has 0 bytes, fewer than the 8"),
    "half a length": (b"\1\0\0", "has 3 bytes, fewer than the 8"),
    "a header of 10 GB": (file_bytes(b"{}", length=10 * 2**30), "states a header of 10,737,418,240 bytes"),
    "a header past the end": (file_bytes(b"{}", length=3), "states a header of 3 bytes; the file has 2 after"),
    "a header that isn't JSON": (file_bytes(b"{'a': 1}"), "isn't JSON"),
    "a header that isn't UTF-8": (file_bytes(b'{"\xff": 1}'), "isn't JSON"),
    "a header nested without end": (file_bytes(b"[" * 100_000), "isn't JSON"),
    "a header that is a list": (file_bytes([]), "isn't a JSON object"),
    "a name twice": (file_bytes(b'{"a": {}, "a": {}}'), "a name appears twice"),
    "an entry without a shape": (file_bytes({"a": {"dtype": "F32", "data_offsets": [0, 4]}}), "expected dtype, shape"),
    "an entry of more": (file_bytes({"a": entry(0, 4) | {"b": 1}}, b"4444"), "expected dtype, shape"),
    "an unknown dtype": (file_bytes({"a": entry(0, 4, dtype="I4")}, b"4444"), "dtype 'I4'; expected one of F64, F32"),
    "a dtype that isn't a name": (file_bytes({"a": entry(0, 4, dtype=["F32"])}, b"4444"), "expected one of F64, F32"),
    "a negative size": (file_bytes({"a": entry(0, 4, shape=[-1, -1])}, b"4444"), r"the shape \[-1, -1\]"),
    "a size that is true": (file_bytes({"a": entry(0, 4, shape=[True])}, b"4444"), r"the shape \[True\]"),
    "a fractional size": (file_bytes({"a": entry(0, 4, shape=[1.0])}, b"4444"), r"the shape \[1.0\]"),
    "too many dims": (file_bytes({"a": entry(0, 4, shape=[1] * 1000)}, b"4444"), "at most 8 sizes"),
    "sizes whose product overflows": (
        file_bytes({"a": entry(0, 4, shape=[2**32, 2**32, 1])}, b"4444"),
        "of shape .* takes 73,786,976,294,838,206,464",
    ),
    "too few bytes": (file_bytes({"a": entry(0, 4, shape=[2])}, b"4444"), "takes 8"),
    "a dtype of another width": (file_bytes({"a": entry(0, 4, dtype="BF16", shape=[1])}, b"4444"), "BF16 .* takes 2"),
    "an end before its start": (file_bytes({"a": entry(4, 0, shape=[0])}, b"4444"), "takes 0"),
    "three offsets": (
        file_bytes({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}, b"4444"),
        "expected a start and an end",
    ),
    "overlapping tensors": (
        file_bytes({"a": entry(0, 8), "b": entry(4, 12)}, b"4" * 12),
        "'b' at byte 4 .* overlaps the tensor before it",
    ),
    "the same bytes twice": (file_bytes({"a": entry(0, 4), "b": entry(0, 4)}, b"4444"), "overlaps"),
    "a gap": (file_bytes({"a": entry(0, 4), "b": entry(8, 12)}, b"4" * 12), "'b' at byte 8 .* leaves a gap"),
    "data past the last tensor": (file_bytes({"a": entry(0, 4)}, b"4" * 5), "has 5 bytes of data, .* describes 4"),
    "truncated data": (file_bytes({"a": entry(0, 8)}, b"4" * 7), "has 7 bytes of data, .* describes 8"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_file_that_lies_is_refused(lie, tmp_path):
    data, message = LIES[lie]
    (path := tmp_path / "model.safetensors").write_bytes(data)
    num_open = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    with pytest.raises(ValueError, match=message) as refusal:
        SafetensorsFile(path)
    assert str(path) in str(refusal.value)
    assert len(str(refusal.value)) < 1000
    if num_open is not None:
        assert len(os.listdir("/proc/self/fd")) == num_open


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # opened like a file, it would wait for a writer
    for name, message in (("pipe", "not a regular file"), (".", "not a regular file"), ("absent", "No such file")):
        with pytest.raises(ValueError, match=message):
            SafetensorsFile(tmp_path / name)


def test_a_file_that_becomes_shorter_is_refused(tmp_path):
    (path := tmp_path / "model.safetensors").write_bytes(file_bytes({"a": entry(0, 8)}, b"4" * 8))
    with SafetensorsFile(path) as file:
        os.truncate(path, path.stat().st_size - 3)
        with pytest.raises(ValueError, match="while it is being read"):
            file.tensors["a"].read((slice(0, 2),))
