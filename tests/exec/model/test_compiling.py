"""megatron-core is imported without torch's compiler, which a function that is called all the same gets then."""

from __future__ import annotations

import subprocess
import sys

import pytest

from recycle.exec.model.compiling import at_first_call

SCRIPT = """
import sys
import torch
from recycle.exec.model import gpt
from recycle.exec.model.build import build_stages
from recycle.job import Job

job = "[shape]\\npipelines = 1\\nranks = 1\\nmicro_batches = 1\\n[model]\\nlayers = 1\\nhidden = 8\\nheads = 1\\n"
build_stages(Job.from_toml(job), [0])
print(torch.are_deterministic_algorithms_enabled())
print([name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules])
import torch._inductor.config
print(torch._inductor.config.deterministic)
"""


@pytest.mark.process
def test_the_compiler_is_not_imported_before_it_is_asked_for_and_knows_then_that_bits_count() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["True", "[]", "True"], done.stderr


def test_a_function_is_decorated_once_at_its_first_call_also_as_a_method() -> None:
    decorated = []

    def decorator(function: object) -> object:
        decorated.append(function)
        return function

    class Layer:
        @at_first_call(decorator)
        def add(self, one: int, *, other: int) -> int:
            """Adds."""
            return one + other

    assert (Layer.add.__name__, Layer.add.__doc__, decorated) == ("add", "Adds.", [])
    assert [Layer().add(1, other=2), Layer().add(3, other=4)] == [3, 7]
    assert len(decorated) == 1
