"""A kind of instruction that is registered outside the package is drawn, labelled and coloured like the others."""

from __future__ import annotations

import gzip
import re
from base64 import b64decode
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from recycle import Schedule, Shape
from recycle.ir.kinds import Compute, InstructionKind, register, unregister
from tests.viz.lanes_bin import decode
from viz.export import export
from viz.figures import palette
from viz.figures.boxes import boxes
from viz.labels import describe, label
from viz.sources import ScheduleFile, schedule_source
from viz.wire import encode


@pytest.fixture
def replayed() -> Iterator[ScheduleFile]:
    """A schedule whose first worker replays the forward of micro-batch 0.1 at the end."""

    @register(
        InstructionKind(
            token="REPLAY",
            title="forward of a peer, computed again",
            run=lambda *_: None,
            seconds=("forward",),
            paints=("redundant",),
            words=("twice",),
        )
    )
    class Replay(Compute):
        """`0REPLAY0.1`."""

        __slots__ = ()

    programs = {"0.0": "0F0.0 0F0.1 0B0.0 0B0.1 0REPLAY0.1", "0.1": "1F0.0 1B0.0 1F0.1 1B0.1"}
    yield schedule_source(Path("mine.json"), Schedule.from_text(Shape(1, 2, 2), programs))
    unregister(Replay)


def test_it_is_drawn_labelled_and_described_by_its_row(replayed: ScheduleFile) -> None:
    (box,) = [box for box in boxes(replayed.lanes) if box.paint is palette.REDUNDANT]
    assert (box.label, box.end - box.start) == ("REPLAY1", 1.0)
    assert label(replayed.lanes, box.operation) == "REPLAY1"
    assert describe(replayed.lanes, box.operation, 0)[:2] == ["0REPLAY0.1", "forward of a peer, computed again"]


def test_the_browser_gets_its_row_with_its_search_words(replayed: ScheduleFile) -> None:
    kind = decode(encode(replayed.lanes))["description"]["kinds"][-1]
    assert (kind["token"], kind["words"], kind["transfer"]) == ("REPLAY", ["twice"], False)
    (part,) = kind["parts"]
    assert palette.PAINTS[part[0]] is palette.REDUNDANT


def test_it_is_in_every_export(replayed: ScheduleFile, tmp_path: Path) -> None:
    for suffix in ("svg", "html", "png"):
        export(tmp_path / f"mine.{suffix}", [replayed])
    assert "0REPLAY0.1\nforward of a peer, computed again" in (tmp_path / "mine.svg").read_text()
    (held,) = re.findall('data-address="data:[^,]*,([^"]*)"', (tmp_path / "mine.html").read_text())
    lanes = decode(gzip.decompress(b64decode(held)))
    kind = lanes["description"]["kinds"][-1]
    assert (kind["token"], kind["title"]) == ("REPLAY", "forward of a peer, computed again")
    replays = np.flatnonzero(lanes["kind"] == len(lanes["description"]["kinds"]) - 1)
    assert [(lanes["stage"][i], lanes["pipeline"][i], lanes["micro_batch"][i]) for i in replays] == [(0, 0, 1)]
    pixels = np.array(Image.open(BytesIO((tmp_path / "mine.png").read_bytes())).convert("RGB")).reshape(-1, 3)
    colour = [int(palette.REDUNDANT.fill[i : i + 2], 16) for i in (1, 3, 5)]
    assert (pixels == colour).all(axis=1).any()
