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
from recycle.ir.kinds import Compute, InstructionKind, register
from tests.kinds import forget
from tests.viz.lanes_bin import decode
from viz.export import export
from viz.figures import palette
from viz.kinds import LOOKS, Look
from viz.sources import ScheduleFile, schedule_source


@pytest.fixture
def rerun() -> Iterator[ScheduleFile]:
    """A schedule whose first worker reruns the forward of micro-batch 0.1 at the end."""

    @register(
        InstructionKind(
            token="RERUN",
            title="forward of a peer, computed again",
            seconds=("forward",),
        )
    )
    class Rerun(Compute):
        """`0RERUN0.1`."""

        __slots__ = ()

    LOOKS[Rerun] = Look(("redundant",), ("twice",))
    programs = {"0.0": "0F0.0 0F0.1 0B0.0 0B0.1 0RERUN0.1", "0.1": "1F0.0 1B0.0 1F0.1 1B0.1"}
    yield schedule_source(Path("mine.json"), Schedule.from_text(Shape(1, 2, 2), programs))
    forget(Rerun)


def test_it_is_in_every_export(rerun: ScheduleFile, tmp_path: Path) -> None:
    for suffix in ("svg", "html", "png"):
        export(tmp_path / f"mine.{suffix}", [rerun])
    assert "0RERUN0.1\nforward of a peer, computed again" in (tmp_path / "mine.svg").read_text()
    (held,) = re.findall('data-address="data:[^,]*,([^"]*)"', (tmp_path / "mine.html").read_text())
    lanes = decode(gzip.decompress(b64decode(held)))
    kind = lanes["description"]["kinds"][-1]
    assert (kind["token"], kind["title"]) == ("RERUN", "forward of a peer, computed again")
    reruns = np.flatnonzero(lanes["kind"] == len(lanes["description"]["kinds"]) - 1)
    assert [(lanes["stage"][i], lanes["pipeline"][i], lanes["micro_batch"][i]) for i in reruns] == [(0, 0, 1)]
    pixels = np.array(Image.open(BytesIO((tmp_path / "mine.png").read_bytes())).convert("RGB")).reshape(-1, 3)
    colour = [int(palette.REDUNDANT.fill[i : i + 2], 16) for i in (1, 3, 5)]
    assert (pixels == colour).all(axis=1).any()
