import pytest

from recycle.ir import compiled
from recycle.solve.search import kernels
from recycle.solve.search.compile_kernels import compile_all


@pytest.mark.slow
def test_the_process_that_compiles_calls_every_kernel_with_the_types_of_a_search() -> None:
    compile_all()
    assert all(compiled._compiled[kernel].signatures for kernel in kernels._KERNELS)
    assert compiled.is_loaded(*kernels._KERNELS)
    assert compiled.is_cached(*kernels._KERNELS)
