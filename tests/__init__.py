"""Tests of recycle, and where they find its files."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
CASES = ROOT / "tests" / "cases"
