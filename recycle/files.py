"""Write files whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from recycle.errors import RecycleError


def write_whole(path: str | Path, text: str | Iterable[str]) -> None:
    """Put `text` in `path` by way of a temporary file beside it: a reader sees the old file or the new one.

    Args:
        text: the file's text, or parts of it one after another.

    Raises:
        RecycleError: the file cannot be written; nothing is left behind.
    """
    path = Path(path)
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise RecycleError(f"{path}: cannot be written ({error.strerror})") from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.writelines([text] if isinstance(text, str) else text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            raise RecycleError(f"{path}: cannot be written ({error.strerror})") from None
        raise
