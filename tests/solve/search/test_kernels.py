import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recycle.ir import compiled
from recycle.solve.problem_arrays import draw, seeded
from recycle.solve.search import kernels
from recycle.solve.search.compile_kernels import compile_all


@pytest.mark.slow
def test_compile_process_compiles_every_kernel():
    compile_all()
    assert all(compiled._compiled[kernel].signatures for kernel in kernels.KERNELS)
    assert compiled.is_loaded(*kernels.KERNELS)
    assert compiled.is_cached(*kernels.KERNELS)


@pytest.mark.slow
@pytest.mark.parametrize("is_given", [False, True])
def test_cache_folder_is_numbas(is_given, tmp_path, monkeypatch):
    from numba.core import caching

    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setattr(caching.config, "CACHE_DIR", str(tmp_path) if is_given else "")
    if is_given:
        monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    for kernel in kernels.KERNELS:
        locators = (caching.UserProvidedCacheLocator, caching.InTreeCacheLocator)
        numbas = [locator.from_function(kernel, kernel.__code__.co_filename) for locator in locators]
        places = [Path(locator.get_cache_path()) for locator in numbas if locator is not None]
        assert compiled.cache_folder(kernel) == places[0]


@pytest.mark.soak
def test_compile_process_imports_the_package_that_started_it(tmp_path):
    """The current folder contains another package with the same name."""
    (tmp_path / "recycle").mkdir()
    (tmp_path / "recycle" / "__init__.py").write_text("raise SystemExit('the wrong one')\n")
    package_folder = Path(kernels.__file__).parents[3]
    starts = (
        f"import sys; sys.path[0] = {str(package_folder)!r};"
        " from recycle.solve.search import kernels; kernels.start_compile_process()"
    )
    cache = tmp_path / "cache"
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache)}
    subprocess.run([sys.executable, "-c", starts], cwd=tmp_path, env=environment, check=True)
    until = time.monotonic() + 240
    while [*cache.glob("*/compiling")] and time.monotonic() < until:
        time.sleep(0.2)
    compiled_ones = {index.name.split("-")[0] for index in cache.glob("*/*.nbi")}
    assert {
        f"{Path(kernel.__code__.co_filename).stem}.{kernel.__name__}" for kernel in kernels.KERNELS
    } <= compiled_ones


def test_random_numbers_of_a_seed_never_change():
    state = seeded(3)
    assert [int(draw(state)) for _ in range(4)] == [119106029, 1583775778, 687545011, 243210352]
    assert seeded(3 + 2147483647) == seeded(3)
