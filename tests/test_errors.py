"""An error's message is one printable line of bounded length, whatever it quotes."""

from recycle import JobError, ScheduleError


def test_a_message_is_one_printable_line() -> None:
    assert str(ScheduleError("plan.json: a\nb\t c")) == "plan.json: a b c"
    assert str(JobError("\x1b[2J\0 \ud800 \ufeffé")) == r"\x1b[2J\x00 \ud800 \ufeffé"


def test_a_long_message_keeps_its_two_ends() -> None:
    message = str(ScheduleError("plan.json: " + "x" * 10**6 + " is not an instruction"))
    assert len(message) < 4100
    assert message.startswith("plan.json: xxx")
    assert message.endswith("xxx is not an instruction")
