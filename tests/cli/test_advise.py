"""`recycle advise`: the chosen job file and other systems."""

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.advice import JOB
from recycle.job import Job


@pytest.fixture(autouse=True)
def files():
    Path("job.toml").write_text(JOB)


def test_the_command_writes_a_job_that_can_be_planned(command):
    told = command(
        "advise job.toml --gpus 16 --gpus-per-node 2 --days 5 --count 2 --seeds 1 --systems hot_spare --save saved"
        " -o chosen.toml --json"
    )
    assert told.status == 0
    first = told.json["configurations"][0]
    chosen = Job.load("chosen.toml")
    assert (chosen.shape.pipelines, chosen.shape.ranks) == (first["pipelines"], first["ranks"])
    assert [each["name"] for each in told.json["systems"]] == ["recycle", "hot_spare"]
    saved = json.loads(Path("saved/comparison.json").read_text())["systems"]
    assert [each["name"].partition(":")[0] for each in saved] == ["1", "2", "hot_spare"]
    assert {**saved[0], "name": "recycle"} == told.json["systems"][0]
    assert command("plan chosen.toml -o plan.json --within 1").status == 0


def test_without_seeds_nothing_is_simulated(command):
    told = command("advise job.toml --gpus 16 --gpus-per-node 2 --count 1 --seeds 0 --save saved --json")
    assert told.status == 0
    assert (told.json["systems"], told.json["configurations"][0]["simulated"]) == ([], [])
    saved = json.loads(Path("saved/comparison.json").read_text())
    assert saved["systems"] == []
    assert [len(table["rows"]) for table in saved["tables"]] == [1, 1, len(told.json["sensitivity"])]
    shutil.copytree("saved", "again")
    assert command("view saved again/comparison.json --export page.html").status == 0
    page = Path("page.html").read_text()
    assert "saved/comparison.json" in page
    assert "again/comparison.json" in page
    assert all(cell in page for table in saved["tables"] for row in table["rows"] for cell in row)
