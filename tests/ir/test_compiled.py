from __future__ import annotations

import importlib.util
import pickle
from pathlib import Path

import pytest

from recycle.ir import compiled

MISSING = b"crecycle.ir.compiled\nA name that is gone\n."
"""A pickle of a class that the module does not have."""


@pytest.mark.search
def test_code_whose_index_names_what_is_gone_is_compiled_anew(tmp_path: Path) -> None:
    source = tmp_path / "doubling.py"
    source.write_text("def doubled(number):\n    return 2 * number\n")
    spec = importlib.util.spec_from_file_location("doubling", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    index = compiled.cache_folder(module.doubled)

    compiled.load(module.doubled)
    assert compiled.run(module.doubled, 1, 3)[0] == 6
    (written,) = index.glob("*.nbi")
    version = pickle.dumps(pickle.loads(written.read_bytes()))
    written.write_bytes(version + MISSING)
    del compiled._compiled[module.doubled]

    compiled.load(module.doubled)
    assert compiled.run(module.doubled, 1, 4)[0] == 8
    assert MISSING not in written.read_bytes()
