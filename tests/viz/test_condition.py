"""Dead and slow workers as text: single ones, pipelines, stages and nodes; what names nothing is refused."""

from __future__ import annotations

import pytest

from recycle import Shape
from recycle.errors import PlanError
from viz.condition import parse

SHAPE = Shape(3, 4, 2)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("1.2, 0.3", ["0.3", "1.2"]),
        ("pipeline:2", ["2.0", "2.1", "2.2", "2.3"]),
        ("stage:3 0.0", ["0.0", "0.3", "1.3", "2.3"]),
        ("node:0/6", ["0.0", "0.1", "0.2", "0.3", "1.0", "1.1"]),
        ("0.1=1.5, 2.0=0.5", ["0.1=1.5", "2.0=0.5"]),
        ("0.1=1.5 0.1", ["0.1"]),
        ("", []),
    ],
)
def test_a_text_names_workers_and_is_written_again(text: str, names: list[str]) -> None:
    found = parse(text, SHAPE)
    assert found.names() == names
    assert parse(",".join(names), SHAPE) == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("7.0", "failed workers"),
        ("rank:1", "'rank:1' is none of the forms: 1.2, pipeline:0"),
        ("pipeline:3", "'pipeline:3' names nothing of D=3 P=4 m=2"),
        ("stage:-1", "'stage:-1' names nothing"),
        ("node:2/6", "'node:2/6' names nothing"),
        ("node:0", "'node:0' names nothing"),
        ("node:0/0", "'node:0/0' names nothing"),
        ("0.1=0", "'0.1=0': write how many times as long it takes"),
        ("0.1=x", "'0.1=x': write how many times"),
        ("9.9=2", "slow workers"),
        ("0.0 " * 3000, "3000 are named; at most 2048"),
    ],
)
def test_what_names_nothing_is_refused_in_one_line(text: str, said: str) -> None:
    with pytest.raises(PlanError) as refused:
        parse(text, SHAPE)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
