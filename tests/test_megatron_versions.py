"""Private names of megatron-core and torch are in one module, and versions outside of the range warn."""

import re
import tomllib
from pathlib import Path

import pytest

import recycle
from recycle import megatron_versions
from recycle.errors import VersionWarning

NAMES = re.compile(
    r"_forward_impl|_make_backward_post_hook|_apply_expert_bias|_saved_(self|mat1|alpha|beta)|_set_default_timeout"
    r"|_group_(start|end)\b|encoder_and_decoder|common\.pt|COMMON_STATE_FNAME|tp_dp_cp|_inductor|_dynamo"
    r"|(?:torch|megatron)[\w.]*(?:\.| import .*\b)_[a-z]"
)
"""Names in texts and imports, or that differ between versions; ruff's SLF001 finds private attributes."""


def test_private_and_version_dependent_names_are_in_one_module():
    package = Path(recycle.__file__).parent
    home = Path(megatron_versions.__file__)
    assert len(home.read_text().splitlines()) <= 500
    for path in package.rglob("*.py"):
        if path != home:
            names = [found[0] for found in NAMES.finditer(path.read_text())]
            assert names == [], f"{path}: use recycle.megatron_versions"


@pytest.mark.parametrize(
    ("versions", "package"),
    [
        ({"megatron-core": "0.16.1", "torch": "2.13.0+cpu"}, None),
        ({"megatron-core": "0.19.2", "torch": "2.15.1"}, None),
        ({"megatron-core": "0.20.0rc1", "torch": "2.14.0"}, "megatron-core 0.20.0rc1"),
        ({"megatron-core": "0.18.0", "torch": "2.12.1"}, "torch 2.12.1"),
    ],
)
def test_only_versions_outside_of_the_range_warn(versions, package, monkeypatch, recwarn):
    monkeypatch.setattr(megatron_versions, "installed_versions", lambda: versions)
    megatron_versions.warn_unsupported_versions.__wrapped__()
    told = [str(warning.message) for warning in recwarn if warning.category is VersionWarning]
    assert [text.partition(" was not")[0] for text in told] == ([] if package is None else [package])


def test_the_requirements_are_the_supported_range():
    project = tomllib.loads((Path(recycle.__file__).parents[1] / "pyproject.toml").read_text())["project"]
    first, end = megatron_versions.SUPPORTED["megatron-core"]
    assert f"megatron-core>={first},<{end}" in project["dependencies"]
