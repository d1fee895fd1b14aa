"""Tests that compile for NVIDIA GPUs that aren't there."""

from __future__ import annotations

import pytest

from trainer.compile.topology import parse_topology
from trainer.errors import UserMistake


def _what_lacks() -> str | None:
    try:
        parse_topology("h100:8").require_compiler()
    except UserMistake as mistake:
        return str(mistake)
    return None


_LACKING = _what_lacks()
needs_gpu_compiler = pytest.mark.skipif(_LACKING is not None, reason=_LACKING or "")
