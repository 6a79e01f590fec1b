"""Bundles: what the processes of one node say of themselves, under one key of the store per folder instead of each's.

A bundle lies in the folder of the keys that it holds; its name there is `@`, the node and a number, and its value maps
their last parts to their texts. Whoever follows the folder sees the keys as if each had been written by itself. Only
keys that are never deleted one by one are bundled: those of a generation, which are deleted by folder, and heartbeats.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

_MARK = "@"


def bundle_name(folder: str, node: int, number: int | None = None) -> str:
    """Name of a node's bundle in `folder`.

    Args:
        number: differs from bundle to bundle of the folder; None where each replaces the one before.
    """
    return f"{folder}/{_MARK}{node}" + ("" if number is None else f".{number}")


def bundled(texts: Mapping[str, str]) -> str:
    """The value of a bundle of these keys: last part of the name -> text."""
    return json.dumps(texts, separators=(",", ":"))


def unbundled(name: str, value: bytes) -> Iterator[tuple[str, bytes]]:
    """The keys that stand for a key of the store: those of a bundle, else the key itself."""
    folder, _, leaf = name.rpartition("/")
    if not leaf.startswith(_MARK):
        yield name, value
        return
    for part, text in json.loads(value).items():
        yield f"{folder}/{part}", text.encode()
