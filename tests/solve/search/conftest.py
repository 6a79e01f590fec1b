"""Results of a kernel in plain Python and compiled."""

from collections.abc import Callable
from typing import Any

import pytest

from recycle.ir import compiled


@pytest.fixture
def in_both_ways(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], tuple[Any, Any]]:
    """in_both_ways(function): (what it gives with plain kernels, what it gives with compiled ones)."""

    def results(function: Callable[[], Any]) -> tuple[Any, Any]:
        given = []
        for compile_from in (1 << 60, 0):
            with monkeypatch.context() as patch:
                patch.setattr(compiled, "_compiled", {})
                patch.setattr(compiled, "COMPILE_FROM", compile_from)
                given.append(function())
                assert bool(compiled._compiled) == (compile_from == 0)
        return given[0], given[1]

    return results
