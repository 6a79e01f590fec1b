"""Freed memory goes back to the system: a viewer is kept open long after what it loaded has been worked out."""

from __future__ import annotations

import ctypes
import gc
import sys


def release_memory() -> None:
    """Return what was freed. glibc keeps freed blocks below 32 MB, which are most columns of a large schedule."""
    gc.collect()
    if not sys.platform.startswith("linux"):
        return
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:
        return  # another C library, which has no such habit
