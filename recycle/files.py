"""Atomic writes and bounded reads of files: no partial files, no pipes or devices, no giant files.

JSON is read strictly: into a type, or an object key by key; duplicate keys are an error.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from recycle.errors import RecycleError

T = TypeVar("T")
MOST_BYTES = 2**29
"""Size limit of reads by default. A million instructions take 15 MB, or 280 MB as a timeline."""
MOST_KEYS = 2**20
"""Keys of one object: as many as a job may have workers."""
_POINTER = b"version https://git-lfs.github.com/spec/"
"""Start of the pointer file that a clone without Git LFS has instead of a large file."""


def read_whole(path: str | Path, refusal: type[RecycleError], most: int = MOST_BYTES) -> bytes:
    """Read a regular file of at most `most` bytes.

    Directories, pipes and devices are refused unread: they may be endless, or block until a writer opens them.

    Raises:
        `refusal`: the file cannot be read, is not a regular file or is too large.
    """
    try:
        with open(path, "rb", opener=_open_without_waiting) as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise refusal(f"{path}: cannot be read (not a regular file: copy its content to one first)")
            if status.st_size > most:
                raise refusal(f"{path}: too large ({status.st_size} bytes, at most {most})")
            content = stream.read()
    except OSError as error:
        raise refusal(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:  # a path with a NUL byte
        raise refusal(f"{path}: cannot be read ({error})") from None
    _require_no_pointer(path, content, refusal)
    return content


def require_content(path: str | Path, refusal: type[RecycleError]) -> None:
    """Raise `refusal` for a Git LFS pointer in place of the content; OSError when the file cannot be opened."""
    with open(path, "rb", opener=_open_without_waiting) as stream:
        _require_no_pointer(path, stream.read(len(_POINTER)), refusal)


def _require_no_pointer(path: str | Path, head: bytes, refusal: type[RecycleError]) -> None:
    if head.startswith(_POINTER):
        raise refusal(f"{path}: is a pointer of Git LFS to its content; fetch the content with: git lfs pull")


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def write_whole(path: str | Path, text: str | bytes | Iterable[str]) -> None:
    """Write a file atomically through a temporary file in the same folder: readers see the old file or the new one.

    Args:
        text: the file's text, its parts in order, or its bytes.

    Raises:
        RecycleError: the file cannot be written, or is a folder, pipe or device; no temporary file remains.
    """
    path = Path(path)
    require_writable(path)
    with writing(path):
        temporary, handle = create_beside(path)
        try:
            with os.fdopen(handle, "wb") as stream:
                parts = [text] if isinstance(text, str | bytes) else text
                stream.writelines(part if isinstance(part, bytes) else part.encode("utf-8") for part in parts)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


def write_if_changed(path: Path, text: str) -> None:
    """As `write_whole`, unless the file holds the text: then a disk without room does not matter."""
    with contextlib.suppress(OSError):
        if path.is_file() and path.read_bytes() == text.encode():
            return
    write_whole(path, text)


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Raise an OSError in the body as RecycleError that `path` cannot be written."""
    try:
        yield
    except OSError as error:
        raise RecycleError(f"{path}: cannot be written ({error.strerror})") from None


def create_beside(path: Path) -> tuple[Path, int]:
    """Create an empty file in the folder of `path`; return (its path, a descriptor to read and write it).

    The name is new, and the mode is that of any new file: 0o666 without the umask's bits.

    Raises:
        OSError: the file cannot be created.
    """
    fresh = path.parent / f".{path.name}.{secrets.token_hex(4)}"
    return fresh, os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Create a folder that appears at `path`, complete, when the block ends without an error.

    The block fills a folder inside a private temporary folder next to `path`; both are removed when the block fails. A
    killed process leaves them behind, under a name that begins with a dot.

    Raises:
        RecycleError: `path` exists, or cannot be written.
    """
    require_absent(path)
    with writing(path):
        private = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
        try:
            scratch = private / path.name  # `private` admits only its owner; this folder gets the default mode
            scratch.mkdir()
            yield scratch
            os.rename(scratch, path)
            sync(path.parent)
        except OSError:
            require_absent(path)  # created by another process meanwhile
            raise
        finally:
            shutil.rmtree(private, ignore_errors=True)


def require_absent(path: Path) -> None:
    """Raise RecycleError if `path` exists; also useful before long computations."""
    if path.exists() or path.is_symlink():
        raise RecycleError(f"{path}: exists already; remove it, or choose another name with -o")


def sync(path: Path) -> None:
    """Flush a file, or the renames inside a folder, to disk, so that they survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_text(path: str | Path, refusal: type[RecycleError]) -> None:
    """Raise `refusal` for a path that is not UTF-8, which neither files nor messages can hold."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise refusal(f"{path}: this path is not UTF-8 text; choose another one") from None


def require_writable(path: Path) -> None:
    """Raise RecycleError if `write_whole` could not write `path`; for use before long computations."""
    with writing(path):  # a name may be too long
        if not path.parent.is_dir():
            raise RecycleError(f"{path}: cannot be written (the folder {path.parent} does not exist)")
        if path.exists() and not path.is_file():
            raise RecycleError(f"{path}: cannot be written (it is not a regular file)")
    if not os.access(path.parent, os.W_OK):
        raise RecycleError(f"{path}: cannot be written (the folder {path.parent} is not writable)")


class _Key:
    """A key that equals no other key, so that the object keeps duplicates."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


def entries(content: str | bytes | msgspec.Raw, refusal: type[RecycleError], where: str = "") -> dict[str, msgspec.Raw]:
    """Parse the JSON object in `content` into its entries; their values stay unparsed.

    Raises:
        `refusal`: a key is duplicated, or there are more than `MOST_KEYS`.
        msgspec.MsgspecError, UnicodeDecodeError, RecursionError: the content is not a JSON object.
    """
    seen: set[str] = set()

    def key(cls: type[_Key], text: str) -> _Key:
        if text in seen:
            raise refusal(f"{where}{text!r} is there twice: keep one of the two")
        if len(seen) == MOST_KEYS:
            raise refusal(f"{where}more than {MOST_KEYS} keys")
        seen.add(text)
        return cls(text)

    parsed = msgspec.json.decode(content, type=dict[_Key, msgspec.Raw], dec_hook=key)
    return {key.text: value for key, value in parsed.items()}


def decoded(content: str | bytes, kind: type[T], refusal: type[RecycleError]) -> T:
    """Parse the JSON in `content` as `kind`, a type that msgspec supports. Raises `refusal` on other content."""
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        raise refusal(str(error).replace("`$.", "`")) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise refusal(f"not valid JSON: {error}") from None
