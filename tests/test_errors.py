"""An error's message is one printable line of bounded length, whatever it quotes."""

import errno

from torch.distributed.checkpoint.api import CheckpointException

from recycle import JobError, ScheduleError
from recycle.errors import first_line


def test_a_message_is_one_printable_line() -> None:
    assert str(ScheduleError("plan.json: a\nb\t c")) == "plan.json: a b c"
    assert str(JobError("\x1b[2J\0 \ud800 \ufeffé")) == r"\x1b[2J\x00 \ud800 \ufeffé"


def test_a_long_message_keeps_its_two_ends() -> None:
    message = str(ScheduleError("plan.json: " + "x" * 10**6 + " is not an instruction"))
    assert len(message) < 4100
    assert message.startswith("plan.json: xxx")
    assert message.endswith("xxx is not an instruction")


def test_the_reason_of_another_librarys_error_is_one_line_without_its_traceback() -> None:
    cause = FileNotFoundError(errno.ENOENT, "No such file or directory", "/x/__0_0.distcp")
    assert first_line(CheckpointException("read", {0: (cause, [])})) == "No such file or directory"  # type: ignore[dict-item]
    assert first_line(CheckpointException("read", {1: (ValueError("\n bad\nmore"), [])})) == "bad"  # type: ignore[dict-item]
    assert first_line(RuntimeError("gone\nException raised from recvBytes (most recent call first):")) == "gone"
    assert first_line(AssertionError()) == "AssertionError"
