"""The `command` fixture; every test has a new current directory, with a plan cache in it."""

import pytest

from tests.cli.command import Command


@pytest.fixture(autouse=True)
def working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RECYCLE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def command(capsys):
    return Command(capsys)
