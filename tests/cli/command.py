"""Runs the command line in this process and catches what it prints and how it exits."""

import json
import shlex
from dataclasses import dataclass

import pytest

from recycle.cli import main
from recycle.errors import CODES


@dataclass
class Outcome:
    """Exit status and both outputs of one command."""

    status: int
    out: str
    err: str

    @property
    def json(self):
        """The one JSON object on standard output; nothing else may be there."""
        return json.loads(self.out)

    def refused(self, *words: str) -> bool:
        """Whether the command refused its input: status 2, nothing printed, one line with a code on standard error."""
        one_line = self.err.startswith("recycle: ") and self.err.count("\n") == 1 and "Traceback" not in self.err
        assert self.err.rpartition(" [")[2].rstrip("]\n") in CODES, self.err
        return self.status == 2 and not self.out and one_line and all(word in self.err for word in words)


class Command:
    """`command("check plan.json --strict")` -> Outcome; text is split as a shell does, a path is an argument."""

    def __init__(self, capsys: pytest.CaptureFixture[str]):
        self.capsys = capsys

    def __call__(self, *arguments) -> Outcome:
        self.capsys.readouterr()
        words = [shlex.split(argument) if isinstance(argument, str) else [str(argument)] for argument in arguments]
        with pytest.raises(SystemExit) as stopped:
            main([word for part in words for word in part])
        printed = self.capsys.readouterr()
        code = stopped.value.code
        return Outcome(code if isinstance(code, int) else 0, printed.out, printed.err)
