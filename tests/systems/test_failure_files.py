"""Each format is read as it says, public traces have the figures of their description, bad files name the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from recycle.errors import TraceError
from recycle.systems.failure_files import read_trace
from tests.systems.traces import public


def written(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_event_csv(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, "0,add,n1\n0,add,n2\n60000,remove,n1\n90500,add,n3\n"))
    assert (trace.nodes, trace.end, trace.failures) == (2, 90.5, 1)
    assert trace.name == "trace.csv"


def test_event_csv_with_causes(tmp_path: Path) -> None:
    text = "1000,remove,n1,GPU\n2000,remove,n1,NIC\n3000,add,n1,GPU\n4000,add,n1,NIC\n"
    trace = read_trace(written(tmp_path, text), population=5)
    assert trace.nodes == 5
    assert [(m.time, dict(m.causes), set(m.joined)) for m in trace.changes] == [(1, {0: "GPU"}, set()), (4, {}, {0})]


def test_count_csv_and_log(tmp_path: Path) -> None:
    csv = read_trace(written(tmp_path, "0,3\n60000,1\n120000,2\n"))
    assert [(m.time, len(m.failed), len(m.joined)) for m in csv.changes] == [(0, 0, 3), (60, 2, 0), (120, 0, 1)]
    log = read_trace(written(tmp_path, "2021-12-11, 11:11:30, 3\n2021-12-11, 11:13:10, 1\n2021-12-11, 11:12:00, 2\n"))
    assert [(m.time, len(m.failed)) for m in log.changes] == [(0, 0), (30, 1), (100, 1)]
    assert "steps back in time: sorted by stamp" in log.notes


def test_the_choice_of_counted_nodes_follows_the_seed(tmp_path: Path) -> None:
    path = written(tmp_path, "0,9\n1000,4\n2000,9\n3000,2\n")
    assert read_trace(path, seed=3) == read_trace(path, seed=3)
    assert len({tuple(sorted(read_trace(path, seed=s).changes[1].failed)) for s in range(5)}) > 1


def test_fault_json(tmp_path: Path) -> None:
    text = (
        '[{"node_id": "u", "event_time": 1.5, "event_type": "fault_start", "fault_type": {"Class": "GPU"}},'
        ' {"node_id": "u", "event_time": 2.0, "event_type": "fault_end", "fault_type": {"Class": "GPU"}}]'
    )
    trace = read_trace(written(tmp_path, text, "faults.json"))
    assert (trace.nodes, trace.end) == (1, 2 * 86400)
    assert trace.changes[0].causes == {0: "GPU"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "trace.csv: is empty"),
        ("0,add,n1\n5,add\n", "line 2: has 2 columns, line 1 has 3"),
        ("0,add,n1\nfive,add,n2\n", "line 2: 'five' is no whole number"),
        ("0,add,n1\n-5,add,n2\n", "line 2: '-5' is no whole number"),
        ("0,add,n1\n5,drop,n2\n", "line 2: drop,n2 is no event"),
        ("9,add,n1\n5,add,n2\n", "line 2: 0.005 s comes after 0.009 s"),
        ("0,1,2,3,4\n", "line 1: 5 columns are no trace"),
        ("2021-13-11, 11:11:30, 3\n", "line 1: 2021-13-11, 11:11:30 is no date and time"),
        ("0,99999999999\n", "line 1: '99999999999' is no whole number"),
        ("[{}]", "is no list of faults"),
        ('[{"node_id": "u", "event_time": -1, "event_type": "fault_start"}]', "is no list of faults"),
    ],
)
def test_a_bad_file_is_one_line_that_names_the_place(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(TraceError) as raised:
        read_trace(written(tmp_path, text))
    assert said in str(raised.value)
    assert "trace.csv" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_bytes_and_missing_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(b"0,add,n1\n\xff\xfe\n")
    with pytest.raises(TraceError, match="line 2: is not UTF-8"):
        read_trace(path)
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("name", "nodes", "failures", "per_node_hour"),
    [
        ("bamboo/g4dn-trace.csv", 24, 74, 0.545),
        ("bamboo/p3-trace.csv", 32, 167, 0.612),
        ("bamboo/a100x1-east1b.txt", 64, 154, 0.0995),
        ("oobleck/scale_gcp-trace.csv", 30, 72, 0.305),
        ("oobleck/scale_p3-trace.csv", 30, 142 - 1, 0.518),  # one comes and goes at one stamp
        ("oobleck/6h.csv", 30, 15, 15 / (22.5 * 90)),
        ("parcae/p3.csv", 32, 167, 0.612),
    ],
)
def test_public_spot_traces(name: str, nodes: int, failures: int, per_node_hour: float) -> None:
    trace = read_trace(public(name))
    assert trace.nodes == nodes
    assert trace.failures == failures
    assert trace.rate * 3600 == pytest.approx(per_node_hour, rel=0.03)


@pytest.mark.parametrize("name", ["infinitehbd/fault_trace.json", "infinitehbd/infinitehbd_events.csv"])
def test_the_hardware_trace(name: str) -> None:
    trace = read_trace(public(name))
    assert trace.nodes == 400
    assert trace.failures == 584 - 2  # two faults start on a server that is down
    assert trace.end == pytest.approx(349 * 86400, rel=1e-3)
    down, most, seconds, since = 0, 0, 0.0, 0.0
    for change in trace.changes:
        seconds += down * (change.time - since)
        down, since = down + len(change.failed) - len(change.joined), change.time
        most = max(most, down)
    assert most == 35  # 8.75 %
    assert seconds / trace.end / 400 == pytest.approx(0.023, abs=0.001)
    assert sum(change.causes.get(n) == "GPU" for change in trace.changes for n in change.failed) == pytest.approx(
        158, abs=2
    )


def test_what_must_be_said_of_a_public_trace() -> None:
    assert any("no GCP trace" in note for note in read_trace(public("oobleck/scale_gcp-trace.csv")).notes)
    assert any("none comes back" in note for note in read_trace(public("oobleck/10m.csv")).notes)
    assert read_trace(public("oobleck/10m.csv")).changes[1].time == pytest.approx(601.2)
