"""What processes say counts in its generation and from its members only, and once."""

from __future__ import annotations

import pytest

from recycle.exec.leader.state import Heard
from recycle.exec.protocol import (
    Acknowledged,
    Copied,
    CopyProgress,
    CutOff,
    EvaluationReport,
    Formed,
    FromWorker,
    GenerationRecord,
    Report,
    StepReport,
    Trouble,
    WorkerMessage,
)
from recycle.job.shape import Worker

REPORT, EVALUATION = Report({0: [1.0]}, 0.5), EvaluationReport([1.0], [8.0])
SAID: list[WorkerMessage] = [
    *(Acknowledged(True, stale=True), Formed("why"), CopyProgress([Copied("1.0", 0, 1, 8, 0.1)])),
    *(Trouble("broke"), CutOff("1.0"), StepReport(4, REPORT), StepReport(4, EVALUATION)),
]


@pytest.fixture
def heard() -> Heard:
    heard = Heard(tensor_parallel=2)
    heard.begin(GenerationRecord(3, ["0.0"], {"0.0": "0.0"}, "plan"))
    return heard


def everything(heard: Heard) -> list[object]:
    parts = [heard.take_parts(Report, 4), heard.take_parts(EvaluationReport, 4)]
    return [*(heard.of(type(message)) for message in SAID if not isinstance(message, StepReport)), *parts]


@pytest.mark.parametrize(("member", "generation"), [("0.0", 2), ("0.0", 4), ("0.0", 0), ("1.0", 3), ("0.0t2", 3)])
def test_messages_of_other_generations_and_processes_count_for_nothing(
    heard: Heard, member: str, generation: int
) -> None:
    for message in SAID:
        heard.take(FromWorker(member, message, generation))
        heard.take(FromWorker("0.0t1" if isinstance(message, StepReport) else member, message, generation))
    assert everything(heard) == [{}, {}, {}, {}, {}, None, None]


def test_reports_are_there_once_all_processes_have_reported(heard: Heard) -> None:
    for message in SAID:
        heard.take(FromWorker("0.0t1", message, 3))
    assert (heard.take_parts(Report, 4), heard.take_parts(EvaluationReport, 4)) == (None, None)
    heard.take(FromWorker("0.0", StepReport(4, REPORT), 3))
    heard.take(FromWorker("0.0", StepReport(4, EVALUATION), 3))
    assert heard.take_parts(Report, 4) == {"0.0": REPORT, "0.0t1": REPORT}
    assert heard.take_parts(EvaluationReport, 4) == {"0.0": EVALUATION, "0.0t1": EVALUATION}
    assert (heard.take_parts(Report, 4), heard.take_parts(Report, 5)) == (None, None)
    assert (heard.silent(Acknowledged), heard.all_said(Acknowledged)) == ({Worker(0, 0)}, False)
    heard.take(FromWorker("0.0", Acknowledged(False), 3))
    assert (heard.silent(Acknowledged), heard.all_said(Acknowledged)) == (set(), True)


def test_first_trouble_and_first_cut_connection_of_a_generation_stand(heard: Heard) -> None:
    for member, what in (("0.0t1", "first"), ("0.0", "second")):
        heard.take(FromWorker(member, Trouble(what), 3))
        heard.take(FromWorker(member, CutOff(what), 3))
        heard.take(FromWorker(member, Trouble("again"), 3))
    assert list(heard.of(Trouble).values()) == [Trouble("first"), Trouble("second")]
    assert list(heard.of(CutOff).items()) == [("0.0t1", CutOff("first")), ("0.0", CutOff("second"))]
    heard.begin(GenerationRecord(4, ["0.0"], {"0.0": "0.0"}, "plan"))
    assert everything(heard) == [{}, {}, {}, {}, {}, None, None]
