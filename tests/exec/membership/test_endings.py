"""How a process ended is put together by one side and taken apart by another."""

from __future__ import annotations

from recycle.exec.exit_description import LINE_SEPARATOR, last_line, with_last_lines

LOG = LINE_SEPARATOR.join(["Traceback", "ValueError: no such tokenizer"])


def test_the_last_line_of_the_log_is_found_again_behind_how_a_process_ended() -> None:
    assert last_line(with_last_lines("ended with exit code 1", LOG), "") == (
        "ended with exit code 1",
        "ValueError: no such tokenizer",
    )


def test_the_log_of_this_machine_counts_where_nobody_wrote_its_end() -> None:
    assert with_last_lines("killed by signal 9", "") == "killed by signal 9"
    assert last_line("ended with exit code 1", LOG) == ("ended with exit code 1", "ValueError: no such tokenizer")
    assert last_line("killed by signal 9", "") == ("killed by signal 9", "")
