"""Bundles: what the processes of one node say of themselves, under one key of the store per folder instead of each's.

A bundle lies in the folder of the keys that it holds; its name there is `@`, the node and a number, and its value maps
their last parts to their texts. Who asks for the keys of a folder gets them as if each had been written by itself. Only
keys that are never deleted one by one are bundled: those of a generation, which are deleted by folder, and heartbeats.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import msgspec

_MARK = "@"
_DECODER = msgspec.json.Decoder(dict[str, str])


def bundle_name(folder: str, node: int, number: int | None = None) -> str:
    """Name of a node's bundle in `folder`.

    Args:
        number: differs from bundle to bundle of the folder; None where each replaces the one before.
    """
    return f"{folder}/{_MARK}{node}" + ("" if number is None else f".{number}")


def bundled(texts: Mapping[str, str]) -> str:
    """The value of a bundle of these keys: last part of the name -> text."""
    return json.dumps(texts, separators=(",", ":"))


def unbundled(leaves: Mapping[str, bytes], only_bundles: bool = False) -> dict[str, str]:
    """The keys right below a folder, by the last part of their names, given those that the store holds.

    Args:
        only_bundles: without those that were written by themselves.
    """
    found: dict[str, str] = {}
    for leaf, value in leaves.items():
        if leaf.startswith(_MARK):
            found.update(_DECODER.decode(value))
        elif not only_bundles:
            found[leaf] = value.decode()
    return found
