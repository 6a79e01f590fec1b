"""The `command` fixture."""

from collections.abc import Iterator

import pytest

from tests.cli.command import Command
from tests.warm import warm_children


@pytest.fixture(scope="package", autouse=True)
def warm() -> Iterator[None]:
    with warm_children():
        yield


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)
