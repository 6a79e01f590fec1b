"""Files are written whole or not at all, and read whole or refused: never an endless, a waiting or a giant one.

JSON in them is read strictly: into a type, or an object key by key, where a key that is there twice is an error.
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
"""Size of the largest file that is read unless said otherwise. A million instructions are 15 MB, as a timeline 280."""
MOST_KEYS = 2**20
"""Keys of one object: as many as a job may have workers."""
_POINTER = b"version https://git-lfs.github.com/spec/"
"""What the small file begins with that a clone has in place of a large one."""


def read_whole(path: str | Path, refusal: type[RecycleError], most: int = MOST_BYTES) -> bytes:
    """The content of a regular file of at most `most` bytes.

    A directory, pipe or device is refused unread: it may have no end, or wait for ever for a writer.

    Raises:
        `refusal`: the file cannot be read, is not a regular file or is too large.
    """
    try:
        with open(path, "rb", opener=_open_without_waiting) as stream:
            found = os.fstat(stream.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise refusal(f"{path}: cannot be read (not a regular file: write what it gives to one first)")
            if found.st_size > most:
                raise refusal(f"{path}: too large to be what it should be ({found.st_size} bytes, at most {most})")
            content = stream.read()
    except OSError as error:
        raise refusal(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:  # a path with a NUL byte
        raise refusal(f"{path}: cannot be read ({error})") from None
    _require_no_pointer(path, content, refusal)
    return content


def require_content(path: str | Path, refusal: type[RecycleError]) -> None:
    """Raise `refusal` for a file that is a pointer of Git LFS to its content; OSError when it cannot be opened."""
    with open(path, "rb", opener=_open_without_waiting) as stream:
        _require_no_pointer(path, stream.read(len(_POINTER)), refusal)


def _require_no_pointer(path: str | Path, head: bytes, refusal: type[RecycleError]) -> None:
    if head.startswith(_POINTER):
        raise refusal(f"{path}: is a pointer of Git LFS to its content; fetch the content with: git lfs pull")


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def write_whole(path: str | Path, text: str | bytes | Iterable[str]) -> None:
    """Put `text` in `path` by way of a temporary file beside it: a reader sees the old file or the new one.

    Args:
        text: the file's text, or parts of it one after another; or its bytes.

    Raises:
        RecycleError: the file cannot be written, or is a folder, pipe or device; nothing is left behind.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            raise RecycleError(f"{path}: cannot be written (there is something that is not a regular file)")
        temporary, handle = create_beside(path)
    except OSError as error:
        raise RecycleError(f"{path}: cannot be written ({error.strerror})") from None
    try:
        with os.fdopen(handle, "wb") as stream:
            parts = [text] if isinstance(text, str | bytes) else text
            stream.writelines(part if isinstance(part, bytes) else part.encode("utf-8") for part in parts)
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            raise RecycleError(f"{path}: cannot be written ({error.strerror})") from None
        raise


def create_beside(path: Path) -> tuple[Path, int]:
    """A new empty file in the folder of `path`: (its path, a descriptor to read and write it).

    Nobody else has a file or link of that name, and its mode is that of any new file: 0o666 without the umask's bits.

    Raises:
        OSError: it cannot be made.
    """
    fresh = path.parent / f".{path.name}.{secrets.token_hex(4)}"
    return fresh, os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder that is at `path` when the block has ended well, with all that it holds, and not before.

    The block gets a folder inside a new one that only this user can enter, beside `path`; both are gone when the block
    fails. A process that is killed leaves them there, under a name that begins with a dot.

    Raises:
        RecycleError: there is something at `path`, or it cannot be written.
    """
    require_absent(path)
    try:
        private = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    except OSError as error:
        raise RecycleError(f"{path}: cannot be written ({error.strerror})") from None
    try:
        scratch = private / path.name  # `private` has no mode for others, this one has that of any new folder
        scratch.mkdir()
        yield scratch
        os.rename(scratch, path)
        sync(path.parent)
    except OSError as error:
        require_absent(path)  # made by someone else meanwhile
        raise RecycleError(f"{path}: cannot be written ({error.strerror})") from None
    finally:
        shutil.rmtree(private, ignore_errors=True)


def require_absent(path: Path) -> None:
    """Raise RecycleError where there is something already; for use before long computations, too."""
    if path.exists() or path.is_symlink():
        raise RecycleError(f"{path}: exists already; remove it, or choose another name with -o")


def sync(folder: Path) -> None:
    """Make renames inside a folder outlast a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_text(path: str | Path, refusal: type[RecycleError]) -> None:
    """Raise `refusal` for a path that is not UTF-8, which no file and no other process can be told as text."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise refusal(f"{path}: this path is not UTF-8 text; choose another one") from None


def require_writable(path: Path) -> None:
    """Raise RecycleError where `write_whole` could not write `path`; for use before long computations."""
    try:
        if not path.parent.is_dir():
            raise RecycleError(f"{path}: cannot be written (the folder {path.parent} does not exist)")
        if path.exists() and not path.is_file():
            raise RecycleError(f"{path}: cannot be written (there is something that is not a regular file)")
    except OSError as error:  # a name that is too long
        raise RecycleError(f"{path}: cannot be written ({error.strerror})") from None
    if not os.access(path.parent, os.W_OK):
        raise RecycleError(f"{path}: cannot be written (the folder {path.parent} may not be written to)")


class _Key:
    """Equal to no other, so that the object keeps every key."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


def entries(content: str | bytes | msgspec.Raw, refusal: type[RecycleError], where: str = "") -> dict[str, msgspec.Raw]:
    """The entries of the JSON object in `content`, their values unread.

    Args:
        where: begins the messages of `refusal`.

    Raises:
        `refusal`: a key is there twice, or there are more than `MOST_KEYS`.
        msgspec.MsgspecError, UnicodeDecodeError, RecursionError: the content is no JSON object.
    """
    seen: set[str] = set()

    def key(cls: type[_Key], text: str) -> _Key:
        if text in seen:
            raise refusal(f"{where}{text!r} is there twice: keep one of the two")
        if len(seen) == MOST_KEYS:
            raise refusal(f"{where}more than {MOST_KEYS} keys")
        seen.add(text)
        return cls(text)

    found = msgspec.json.decode(content, type=dict[_Key, msgspec.Raw], dec_hook=key)
    return {key.text: value for key, value in found.items()}


def decoded(content: str | bytes, kind: type[T], refusal: type[RecycleError]) -> T:
    """The JSON in `content` as `kind`, a type that msgspec knows. Raises `refusal` where it is not."""
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        raise refusal(str(error).replace("`$.", "`")) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise refusal(f"not valid JSON, perhaps truncated: {error}") from None
