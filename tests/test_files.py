"""Files are read whole or refused, in whatever error the caller raises; its message is one printable line."""

import errno
import os
import secrets
import stat
from pathlib import Path

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from recycle import JobError, RecycleError, ScheduleError
from recycle.errors import first_line
from recycle.files import MOST_BYTES, read_whole, whole_folder, write_whole


@pytest.fixture(params=[0o022, 0o077, 0o002])
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_written_file_is_read(tmp_path):
    write_whole(tmp_path / "file", "whole")
    assert read_whole(tmp_path / "file", RecycleError) == b"whole"
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_whole(tmp_path / "link", RecycleError, most=5) == b"whole"


@pytest.mark.parametrize("refusal", [JobError, ScheduleError])
def test_unreadable_file_raises_the_callers_error(refusal, tmp_path):
    with pytest.raises(refusal, match=r"none: cannot be read \(No such file or directory\)"):
        read_whole(tmp_path / "none", refusal)
    with pytest.raises(refusal, match=r"cannot be read \(Is a directory\)"):
        read_whole(tmp_path, refusal)
    with pytest.raises(refusal, match=r"a\\x00b: cannot be read \(embedded null byte\)"):
        read_whole("a\0b", refusal)


def test_pipes_and_devices_are_refused_unread(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), Path("/dev/null")):
        with pytest.raises(ScheduleError, match=rf"{path}: cannot be read \(not a regular file"):
            read_whole(path, ScheduleError)


def test_giant_file_is_refused_unread(tmp_path):
    with (tmp_path / "giant").open("wb") as file:
        file.truncate(MOST_BYTES + 1)  # a hole: takes no room on the disk
    with pytest.raises(ScheduleError, match=r"giant: too large .*\(536870913 bytes, at most 536870912\)"):
        read_whole(tmp_path / "giant", ScheduleError)
    (tmp_path / "small").write_bytes(b"123456")
    with pytest.raises(JobError, match=r"\(6 bytes, at most 5\)"):
        read_whole(tmp_path / "small", JobError, most=5)


def test_a_pipe_or_a_device_is_not_replaced_by_a_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(RecycleError, match=rf"{path}: cannot be written \(it is not a reg"):
            write_whole(path, "text")
    assert (tmp_path / "pipe").is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_files_and_folders_have_the_modes_that_the_umask_gives(umask, tmp_path):
    write_whole(tmp_path / "file", "text")
    assert mode(tmp_path / "file") == 0o666 & ~umask
    with whole_folder(tmp_path / "folder") as folder:
        write_whole(folder / "file", "text")
        (around,) = set(tmp_path.iterdir()) - {tmp_path / "file"}
        assert mode(around) == 0o700
    assert mode(tmp_path / "folder") == 0o777 & ~umask
    assert mode(tmp_path / "folder" / "file") == 0o666 & ~umask


def test_guessable_links_and_folders_are_left_alone(tmp_path):
    """Another user of a shared folder plants a link; or a user's own folder has such a name."""
    important, shared = tmp_path / "important", tmp_path / "shared"
    for folder in (important, shared, shared / ".own.part"):
        folder.mkdir()
        (folder / "file").write_text("important")
    (shared / ".mine.part").symlink_to(important)
    (shared / ".mine").symlink_to(important)
    before = set(shared.iterdir())
    for name in ("mine", "own"):
        with pytest.raises(RecycleError, match="no weights"), whole_folder(shared / name):
            raise RecycleError("no weights")
    assert set(shared.iterdir()) == before
    for name in ("mine", "own"):
        with whole_folder(shared / name) as folder:
            (folder / "new").touch()
    assert set(shared.iterdir()) == {*before, shared / "mine", shared / "own"}
    assert [path.name for path in (shared / "mine").iterdir()] == ["new"]
    assert [(folder / "file").read_text() for folder in (important, shared / ".own.part")] == ["important"] * 2


def test_a_link_under_the_name_of_a_temporary_file_is_not_followed(tmp_path, monkeypatch):
    """As if it could be guessed."""
    monkeypatch.setattr(secrets, "token_hex", lambda _: "guessed")
    (tmp_path / "important").write_text("important")
    (tmp_path / ".file.guessed").symlink_to(tmp_path / "important")
    with pytest.raises(RecycleError, match=r"file: cannot be written \(File exists\)"):
        write_whole(tmp_path / "file", "text")
    assert (tmp_path / "important").read_text() == "important"
    assert (tmp_path / ".file.guessed").is_symlink()


def test_first_complete_folder_wins(tmp_path):
    def write(name, meanwhile):
        with whole_folder(tmp_path / "folder") as folder:
            (folder / name).touch()
            meanwhile()

    with pytest.raises(RecycleError, match="folder: exists already"):
        write("late", lambda: write("first", lambda: None))
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["first"]


def test_a_message_is_one_printable_line():
    assert str(ScheduleError("plan.json: a\nb\t c")) == "plan.json: a b c"
    assert str(JobError("\x1b[2J\0 \ud800 \ufeffé")) == r"\x1b[2J\x00 \ud800 \ufeffé"


def test_a_long_message_keeps_its_two_ends():
    message = str(ScheduleError("plan.json: " + "x" * 10**6 + " is not an instruction"))
    assert len(message) < 4100
    assert message.startswith("plan.json: xxx")
    assert message.endswith("xxx is not an instruction")


def test_first_line_of_other_libraries_errors():
    cause = FileNotFoundError(errno.ENOENT, "No such file or directory", "/x/__0_0.distcp")
    assert first_line(CheckpointException("read", {0: (cause, [])})) == "No such file or directory"
    assert first_line(CheckpointException("read", {1: (ValueError("\n bad\nmore"), [])})) == "bad"
    assert first_line(RuntimeError("gone\nException raised from recvBytes (most recent call first):")) == "gone"
    assert first_line(AssertionError()) == "AssertionError"
