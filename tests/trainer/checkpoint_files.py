"""Changes checkpoints, and makes their digests right again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def sign(checkpoint: Path) -> None:
    """Makes the digests right, as `sha256sum` would."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(checkpoint)}\n" for path in files]
    (checkpoint / "SHA256SUMS").write_text("".join(lines))


def set_config(workdir: Path, config: Any) -> None:
    """Has a workdir and its checkpoints tell another config, given as JSON values."""
    (workdir / "config.json").write_text(json.dumps(config))
    for checkpoint in (workdir / "checkpoints").iterdir():
        run = json.loads((checkpoint / "run.json").read_text())
        run["config_history"] = {"config": config, "changes": []}
        (checkpoint / "run.json").write_text(json.dumps(run))
        sign(checkpoint)
