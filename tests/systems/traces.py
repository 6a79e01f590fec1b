"""Where the public failure traces lie, if they are there at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("RECYCLE_TRACES") or Path(__file__).resolve().parents[3] / "shared" / "traces")


def public(name: str) -> Path:
    """The path of a public trace; skips the test where the traces are missing."""
    path = FOLDER / name
    if not path.is_file():
        pytest.skip(f"no public traces in {FOLDER}: set RECYCLE_TRACES to the folder that holds {name}")
    return path
