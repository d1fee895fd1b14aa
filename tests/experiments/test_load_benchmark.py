"""The benchmark of loading: the folder that it writes is a Llama's, and each load has a row."""

import json
import math

from experiments.benchmarks.load_pretrained import LoadArguments, main, tensor_shapes, write_folder
from layers.pretrained import config_from_huggingface


def test_the_default_folder_is_a_llama_31_8b():
    assert sum(map(math.prod, tensor_shapes(LoadArguments()).values())) == 8_030_261_248


def test_a_run_writes_a_row_for_each_load_and_leaves_no_folder(tmp_path, capsys):
    output, folder = tmp_path / "rows.jsonl", tmp_path / "folder"
    folder.mkdir()
    arguments = LoadArguments(num_layers=2, width=512, vocab_size=1024)
    num_bytes = write_folder(folder, arguments)
    assert num_bytes == 2 * config_from_huggingface(folder).num_parameters
    for path in folder.iterdir():
        path.unlink()

    sizes = ["--num-layers", "2", "--width", "512", "--vocab-size", "1024"]
    assert main([*sizes, "--folder", str(folder), "--output", str(output)]) == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["from"] for row in rows] == ["disk, first load", "disk", "page cache"]
    for row in rows:
        assert row["folder_bytes"] == num_bytes
        assert row["seconds"] > 0
        assert 0 < row["resident_before_bytes"] <= row["resident_peak_bytes"]
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert not any(folder.iterdir())
