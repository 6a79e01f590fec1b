"""The `command` fixture; every test has a new current directory, with a plan cache in it."""

from pathlib import Path

import pytest

from tests.cli.command import Command


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RECYCLE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)
