"""An instruction moves in its worker's program, and the answer is the checker's and the simulator's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from recycle import Profile, Schedule, Shape, check, simulate
from recycle.ir.families import one_f_one_b
from tests.viz.components import answered, decode
from viz.app import build_app
from viz.numbers import short
from viz.pages.editing import move
from viz.sources import schedule_source

SCHEDULE = one_f_one_b(Shape(1, 2, 3))
TIMES = Profile.uniform(1.0, 2.0, 1.5)


def test_a_move_changes_one_program_and_implies_the_rest() -> None:
    lowered = simulate(SCHEDULE).schedule
    assert move(lowered, 1, 2, 2).text() == SCHEDULE.text()
    words_of_worker = SCHEDULE.text()["0.1"].split()
    moved = move(lowered, 1, 1, 3).text()
    assert moved["0.0"] == SCHEDULE.text()["0.0"]
    assert moved["0.1"].split() == [words_of_worker[place] for place in (0, 2, 3, 1, 4, 5)]
    assert move(lowered, 0, 0, 99).text()["0.0"].split()[-1] == "0F0.0"
    with pytest.raises(IndexError):
        move(lowered, 1, 99, 0)


def test_the_page_gets_lanes_findings_and_file_of_an_edit() -> None:
    client: Any = build_app([schedule_source(Path("1f1b"), SCHEDULE, TIMES)]).server.test_client()
    address = re.search(r"lanes/\w+\.bin", client.get("/").get_data(as_text=True))[0]  # type: ignore[index]

    def edit(address: str, place: int, to: int) -> tuple[Any, str, Any]:
        """The answer, the address of its lanes, and their description."""
        sent = client.post("/edit", json={"address": address, "worker": 1, "place": place, "to": to})
        answer, (lanes,) = answered(sent)
        return answer, answer["addresses"][0], decode(lanes)["description"]

    valid, moved, lanes = edit(address, 1, 2)
    expected = simulate(move(simulate(SCHEDULE, TIMES).schedule, 1, 1, 2), TIMES)
    assert (valid["message"], lanes["span"]) == ("valid", expected.makespan)
    assert answered(client.get(moved.replace("lanes/", "figures/")))[0]["headline"][0][1] == short(expected.period, 6)
    stuck, halted, lanes = edit(moved, 0, 5)
    (finding,) = check(move(expected.schedule, 1, 0, 5))
    assert stuck["message"].startswith(f"error: {finding.message}")
    assert lanes["halt"] is not None
    saved = client.get(halted.replace("lanes/", "/edited/").replace(".bin", ".json"))
    assert Schedule.loads(saved.data).text() == move(expected.schedule, 1, 0, 5).text()
    again, address, _ = edit(halted, 5, 0)
    assert (address, again["message"]) == (moved, "valid")
    refused = [
        client.post("/edit", json=body).status_code for body in ({}, {"address": "x", "worker": 0, "place": 0, "to": 0})
    ]
    assert [*refused, client.get("/edited/x.json").status_code] == [400, 404, 404]
