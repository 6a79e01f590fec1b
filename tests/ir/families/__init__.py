"""How many chunks per worker the tests of all families give to each."""

CHUNKS = {"interleaved": 2, "looped-bfs": 2, "zb-v": 2, "v-half": 2, "v-min": 2, "dualpipe-v": 2}
"""Families that take, or only take, more than one chunk."""


def chunks_of(family: str) -> int:
    return CHUNKS.get(family, 1)
