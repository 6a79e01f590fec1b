"""Hypothesis strategies for hostile files, made from valid ones or from nothing, and a check of readers."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from recycle.errors import RecycleError

SCRAPS = [
    *(b"", b" ", b"\n", b"\r\n", b"\t", b"\0", b"\x1b[2J", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\\ud800"),
    *(b'"', b"\\", b"'", b"{", b"}", b"[", b"]", b"(", b")", b":", b",", b";", b"@", b".", b"=", b"#", b"-", b"+"),
    *(b"null", b"true", b"NaN", b"-0", b"1e999", b"1e-999", b"0.5", b"-1", b"007", b"65536"),
    *(b"9" * 30, b"9" * 400, b"9" * 5000),
    *(b"0F0", b"0B0.0", b"9STEP", b"0SEND_F0@0.0", b"(0F0;0B0)", b"0.0", b"[" * 2000, b'{"a":' * 2000),
]  # fmt: skip
"""Pieces that readers trip over."""

JUNK = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 12),
        st.sampled_from([2**31, -(2**31) - 1, 2**63, 2**64, -(2**63) - 1, 10**30, 10**400, 1.0, 0.5, -0.0]),
        st.floats(),
        st.text(max_size=4),
        st.sampled_from(["0.0", "0.1", "9.9", "0F0.0", "1B0.1 1B0.1", "0STEP 9REDUCE_GRAD", "\ud800", "\0", "barrier"]),
    ),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["0.0", "0.7", "a"]), inner, max_size=2)
    ),
    max_leaves=4,
)
"""JSON values that fit nowhere in particular."""

_TOKEN = re.compile(rb"[0-9]+|[A-Za-z_]+|\s+|.", re.DOTALL)


def any_bytes() -> st.SearchStrategy[bytes]:
    return st.binary(max_size=60) | st.lists(st.sampled_from(SCRAPS), max_size=12).map(b"".join)


@st.composite
def mutated(draw: st.DrawFn, seeds: Sequence[bytes]) -> bytes:
    """A valid file with a few bytes flipped, inserted or deleted, or cut short."""
    content = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(content)))
        end = draw(st.integers(start, min(len(content), start + 20)))
        new = draw(st.sampled_from(SCRAPS) | st.binary(max_size=2))
        content = draw(
            st.sampled_from(
                [
                    content[:start] + new + content[start:],
                    content[:start] + new[:1] + content[start + 1 :],
                    content[:start] + content[end:],
                    content[:end] + content[start:],
                    content[:start],
                ]
            )
        )
    return content


@st.composite
def retold(draw: st.DrawFn, seeds: Sequence[bytes]) -> bytes:
    """A valid file with words and numbers replaced by others, swapped, left out or told twice."""
    tokens = _TOKEN.findall(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 4))):
        a, b = draw(st.integers(0, len(tokens) - 1)), draw(st.integers(0, len(tokens) - 1))
        new = draw(st.sampled_from(SCRAPS) | st.integers(0, 20).map(lambda number: str(number).encode()))
        before, after = tokens[:a], tokens[a + 1 :]
        swapped = list(tokens)
        swapped[a], swapped[b] = tokens[b], tokens[a]
        tokens = draw(
            st.sampled_from([[*before, new, *after], swapped, [*before, *after], [*before, tokens[b], *after]])
        ) or [b""]  # fmt: skip
    return b"".join(tokens)


@st.composite
def restructured(draw: st.DrawFn, documents):
    """A valid JSON-like document with one to three of its values, keys or entries replaced."""
    document = json.loads(json.dumps(draw(st.sampled_from(documents))))
    for _ in range(draw(st.integers(1, 3))):
        at = document
        while isinstance(at, dict | list) and at:
            key = draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
            if not isinstance(at[key], dict | list) or not at[key] or draw(st.booleans()):
                how = draw(st.sampled_from(["value", "value", "drop", "key"]))
                if how == "value":
                    at[key] = draw(JUNK)
                elif how == "key" and isinstance(at, dict):
                    at[draw(st.sampled_from([*at, "0.0", "1.0", "00.0", "\ud800", ""]))] = at.pop(key)
                else:
                    del at[key]
                break
            at = at[key]
    return document


def read_or_refused(read: Callable[[], Any], refusal: type[RecycleError], name: str):
    """Return the result of `read`, or None if it refuses with one printable line that begins with the file's name."""
    try:
        return read()
    except refusal as error:
        message = str(error)
        assert message.startswith(f"{name}: "), message
        assert message.isprintable()
        return None
