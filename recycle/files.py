"""Write files whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from recycle.errors import RecycleError


def write_whole(path: str | Path, text: str) -> None:
    """Put `text` in `path` by way of a temporary file beside it: a reader sees the old file or the new one.

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
            stream.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise RecycleError(f"{path}: cannot be written ({error.strerror})") from None
