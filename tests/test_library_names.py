"""What recycle uses of megatron-core and torch is in every supported version, as their sources say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.library_names import uses
from tests.library_names.parameters import UNKNOWN
from tests.library_names.sources import Source
from tests.library_names.table import NOT_IN_TABLE, described, faults, full_table, installed
from tests.library_names.uses import used, uses_in

EXCEPTIONS = {
    "megatron.core.pipeline_parallel.schedules.backward_step": "run_backward_step asks for its parameters",
    "torch.distributed.ProcessGroup.__init__": "torch's stub states one of two constructors",
    "torch.distributed.ProcessGroupGloo._Options": "torch's stubs of 2.14 and 2.15 leave it out, the class has it",
    "torch.utils.deterministic.fill_uninitialized_memory": "the module becomes an object with this property",
}
"""Name -> why its use is right although the sources of a version speak against it."""


def test_every_name_and_call_fits_every_supported_version() -> None:
    table = full_table()
    assert [set(table["megatron-core"]), {version[:4] for version in table["torch"]}] == [
        {"0.16.1", "0.17.1", "0.18.2", "0.19.2"},
        {"2.13", "2.14", "2.15"},
    ]
    source = Source(installed("torch"))
    found = {
        name: places for name, places in faults(used(), table).items() if not is_new_public_name(name, table, source)
    }
    assert [fault for name, places in found.items() if name not in EXCEPTIONS for fault in places] == []
    assert sorted(found) == sorted(EXCEPTIONS)


def is_new_public_name(name: str, table: Mapping[str, Mapping[str, Any]], torch: Source) -> bool:
    """Whether a name is public, in the installed torch, and not yet in the table, which needs torch's large wheels."""
    is_public = name.startswith("torch.") and "._" not in name
    return is_public and all(name not in names for names in table["torch"].values()) and bool(torch.describe(name))


def test_only_public_names_of_torch_may_miss_in_the_table() -> None:
    table, source = full_table(), Source(installed("torch"))
    names = ("torch.sinh", "torch.no_such", "torch.cat", "torch.distributed.distributed_c10d._world.pg_tags")
    assert [is_new_public_name(name, table, source) for name in names] == [True, False, False, False]


def test_the_table_is_what_the_installed_sources_say() -> None:
    source = Source(installed("megatron.core"), Source(installed("torch")))
    table = full_table()["megatron-core"].get(source.versions["megatron-core"])
    if table is None:
        pytest.skip("the table does not cover the installed megatron-core")
    changed = {name: (table.get(name), now) for name, now in described(source, "megatron", used()).items()}
    assert {name: pair for name, pair in changed.items() if pair[0] != pair[1]} == {}


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("get_model_type(1)", []),
        ("get_model_type()", ["1.0 needs model", "2.0 needs model"]),
        ("get_model_type(model=1, deep=True)", ["1.0 has no parameter deep"]),
        ("get_model_type(1, 2)", ["1.0 takes 1 positional arguments"]),
        ("get_model_type(*many)", []),
        ("utils.gone", ["2.0 has no such name"]),
        ("utils.new(1)", ["1.0 has no such name"]),
        (
            "utils.other",
            [f"{version} {NOT_IN_TABLE}" for version in ("1.0", "2.0")],
        ),
        ("class Own(utils.Base):\n    def step(self, a): ...", ["2.0 passes"]),
        (
            "class Own(utils.Base):\n    def step(self, a, **named):\n        super().step(a, b=1)",
            ["1.0 has no parameter b"],
        ),
        ("class Own(utils.Base):\n    def added(self): ...", ["1.0 has no such method"]),
        ("def use(base: utils.Base):\n    base.lost(1)", ["2.0 has no such name"]),
    ],
)
def test_a_use_that_a_version_lacks_is_found(
    statement: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = "megatron.core.utils"
    older = {
        prefix: UNKNOWN,
        f"{prefix}.get_model_type": "(model)",
        f"{prefix}.gone": UNKNOWN,
        f"{prefix}.new": None,
        f"{prefix}.Base": UNKNOWN,
        f"{prefix}.Base.step": "(a)",
        f"{prefix}.Base.added": None,
        f"{prefix}.Base.lost": "(a)",
    }
    newer = older | {
        f"{prefix}.get_model_type": "(model, deep=)",
        f"{prefix}.gone": None,
        f"{prefix}.new": "(a, *, b=)",
        f"{prefix}.Base.step": "(a, b=)",
        f"{prefix}.Base.added": "()",
        f"{prefix}.Base.lost": None,
    }
    source = tmp_path / "used.py"
    source.write_text(f"from megatron.core import utils\nfrom megatron.core.utils import get_model_type\n{statement}\n")
    monkeypatch.setattr(uses, "ROOT", tmp_path)
    monkeypatch.setattr(uses, "IN_STRINGS", ())
    found = faults(uses_in([source]), {"megatron-core": {"1.0": older, "2.0": newer}})
    told = [fault.partition("megatron-core ")[2] for faults_of_name in found.values() for fault in faults_of_name]
    assert told == expected
