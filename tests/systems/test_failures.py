"""Failure traces: rows become changes, each file format is read as it says, and the generator gives its defaults."""

import os
from pathlib import Path

import pytest

from recycle.errors import TraceError
from recycle.systems.failure_files import read_trace
from recycle.systems.failure_generator import CAUSES, Generator
from recycle.systems.failures import FailureTrace, NodeChange, Row, trace_from_rows


def rows(text: str) -> list[Row]:
    """Events as "5 -a; 9 +c": a goes after 5 seconds, c comes after 9."""
    events = [event.split() for event in text.split("; ") if event]
    return [Row(line, float(time), what[0] == "-", what[1:]) for line, (time, what) in enumerate(events, 1)]


def changes_text(trace: FailureTrace) -> str:
    """Its changes in the same way, by place."""
    return "; ".join(
        " ".join([f"{each.time:g}", *(f"-{node}" for node in each.failed), *(f"+{node}" for node in each.joined)])
        for each in trace.changes
    )


@pytest.mark.parametrize(
    ("events", "options", "nodes", "up", "changes"),
    [
        # An instance takes the lowest free place.
        ("0 +a; 0 +b; 5 -a; 9 +c; 12 +d", {}, 3, 0, "0 +0 +1; 5 -0; 9 +0; 12 +2"),
        # What comes and goes at one stamp is one change, in any order.
        ("0 +a; 0 +b; 7 +c; 7 -a", {}, 2, 0, "0 +0 +1; 7 -0 +0"),
        ("0 +a; 0 +b; 7 -a; 7 +c", {}, 2, 0, "0 +0 +1; 7 -0 +0"),
        # A fault of no length is a failure and a return.
        ("3 -a; 3 +a", {"counted": True, "population": 4}, 4, 4, "3 -0 +0"),
        # Overlapping faults of a server end with the last one.
        ("1 -a; 2 -a; 4 +a; 9 +a", {"counted": True}, 1, 1, "1 -0; 9 +0"),
        # A server that returns keeps its place.
        ("1 -a; 2 -b; 4 +b; 5 +a; 6 -b", {"population": 3}, 3, 3, "1 -0; 2 -1; 4 +1; 5 +0; 6 -1"),
        ("0 +a; 1 +b; 2 -a; 3 +c; 4 +a", {}, 3, 0, "0 +0; 1 +1; 2 -0; 3 +2; 4 +0"),
    ],
)
def test_rows_become_changes(events, options, nodes, up, changes):
    trace = trace_from_rows(rows(events), "t", **options)
    assert (trace.nodes, trace.up, changes_text(trace)) == (nodes, frozenset(range(up)), changes)


@pytest.mark.parametrize(
    ("events", "options", "message"),
    [
        ("0 +a; 5 -b", {}, "t, line 2: b is removed but was never added"),
        ("0 +a; 5 +a", {}, "t, line 2: a is added but is up already"),
        ("0 +a; 5 -a; 6 -a", {}, "t, line 3: a is removed but is not up"),
        ("5 +a; 4 +b", {}, "t, line 2: 4 s comes after 5 s"),
        ("", {}, "t: has no events"),
        ("0 +a; 0 +b; 0 +c", {"population": 2}, "3 nodes have events, which is more than the population of 2"),
    ],
)
def test_impossible_row_is_refused(events, options, message):
    with pytest.raises(TraceError, match=message):
        trace_from_rows(rows(events), "t", **options)


THREE = trace_from_rows(rows("1 -a; 2 -b; 3 +a; 4 -c"), "t")


def test_a_larger_population_is_sampled_by_seed():
    fitted = THREE.fitted(2, seed=1)
    assert fitted == THREE.fitted(2, seed=1)
    assert fitted.nodes == 2
    assert fitted.failures in (1, 2)
    assert {THREE.fitted(1, seed).changes[0].time for seed in range(8)} == {1, 2, 4}


def test_nodes_beyond_the_trace_never_fail():
    fitted = THREE.fitted(10)
    assert fitted.up == frozenset(range(10))
    assert len({node for change in fitted.changes for node in change.failed}) == 3


def test_the_share_of_nodes_alive_in_parts_of_the_time():
    changes = (NodeChange(3.0, frozenset({0, 1}), frozenset()), NodeChange(7.0, frozenset(), frozenset({0})))
    trace = FailureTrace("t", 4, frozenset(range(4)), changes, 12.0)
    assert trace.alive() == [(0.0, 4), (3.0, 2), (7.0, 3)]
    assert trace.shares_alive(3) == pytest.approx([3.5 / 4, 2.25 / 4, 3 / 4])
    assert sum(trace.shares_alive(60)) / 60 == pytest.approx(trace.node_seconds() / 48)


HARDWARE = ("fault_trace.json", "infinitehbd_events.csv")
FOLDER = Path(os.environ.get("RECYCLE_TRACES") or Path(__file__).resolve().parents[3] / "shared" / "traces")


def public(name: str) -> Path:
    """The path of a public trace; skips the test where the traces are missing."""
    path = FOLDER / name
    if not path.is_file():
        pytest.skip(f"no public traces in {FOLDER}: set RECYCLE_TRACES to the folder that holds {name}")
    return path


def written(folder: Path, text: str, name="trace.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_event_csv(tmp_path):
    trace = read_trace(written(tmp_path, "0,add,n1\n0,add,n2\n60000,remove,n1\n90500,add,n3\n"))
    assert (trace.nodes, trace.end, trace.failures) == (2, 90.5, 1)
    assert trace.name == "trace.csv"


def test_event_csv_with_causes(tmp_path):
    text = "1000,remove,n1,GPU\n2000,remove,n1,NIC\n3000,add,n1,GPU\n4000,add,n1,NIC\n"
    trace = read_trace(written(tmp_path, text), population=5)
    assert trace.nodes == 5
    assert [(m.time, dict(m.causes), set(m.joined)) for m in trace.changes] == [(1, {0: "GPU"}, set()), (4, {}, {0})]


def test_count_csv_and_log(tmp_path):
    csv = read_trace(written(tmp_path, "0,3\n60000,1\n120000,2\n"))
    assert [(m.time, len(m.failed), len(m.joined)) for m in csv.changes] == [(0, 0, 3), (60, 2, 0), (120, 0, 1)]
    log = read_trace(written(tmp_path, "2021-12-11, 11:11:30, 3\n2021-12-11, 11:13:10, 1\n2021-12-11, 11:12:00, 2\n"))
    assert [(m.time, len(m.failed)) for m in log.changes] == [(0, 0), (30, 1), (100, 1)]
    assert "times go back: rows are sorted by time" in log.notes


def test_fault_json(tmp_path):
    text = (
        '[{"node_id": "u", "event_time": 1.5, "event_type": "fault_start", "fault_type": {"Class": "GPU"}},'
        ' {"node_id": "u", "event_time": 2.0, "event_type": "fault_end", "fault_type": {"Class": "GPU"}}]'
    )
    trace = read_trace(written(tmp_path, text, "faults.json"))
    assert (trace.nodes, trace.end) == (1, 2 * 86400)
    assert trace.changes[0].causes == {0: "GPU"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "trace.csv: is empty"),
        ("0,add,n1\n5,add\n", "line 2: has 2 columns, line 1 has 3"),
        ("0,add,n1\nfive,add,n2\n", "line 2: 'five' is not a whole number"),
        ("0,add,n1\n-5,add,n2\n", "line 2: '-5' is not a whole number"),
        ("0,add,n1\n5,drop,n2\n", "line 2: drop,n2 is not an event"),
        ("9,add,n1\n5,add,n2\n", "line 2: 0.005 s comes after 0.009 s"),
        ("0,1,2,3,4\n", "line 1: 5 columns are not a trace"),
        ("2021-13-11, 11:11:30, 3\n", "line 1: 2021-13-11, 11:11:30 is not a date and time"),
        ("0,99999999999\n", "line 1: '99999999999' is not a whole number"),
        ("[{}]", "is not a list of faults"),
        ('[{"node_id": "u", "event_time": -1, "event_type": "fault_start"}]', "is not a list of faults"),
    ],
)
def test_invalid_trace_is_refused_with_file_and_line(tmp_path, text, message):
    with pytest.raises(TraceError) as raised:
        read_trace(written(tmp_path, text))
    assert message in str(raised.value)
    assert "trace.csv" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_bytes_and_missing_files_are_refused(tmp_path):
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
        # Two faults start on a server that is down. The servers are down for 2.3 % of the 349 days.
        *((f"infinitehbd/{name}", 400, 584 - 2, 582 / (400 * 0.977 * 349 * 24)) for name in HARDWARE),
    ],
)
def test_public_traces(name, nodes, failures, per_node_hour):
    trace = read_trace(public(name))
    assert trace.nodes == nodes
    assert trace.failures == failures
    assert trace.rate * 3600 == pytest.approx(per_node_hour, rel=0.03)


def test_generator_defaults_match_the_hardware_trace():
    traces = [Generator(days=349, seed=seed).trace(400) for seed in range(6)]
    per_day = [trace.rate * 86400 * 1000 for trace in traces]
    assert sum(per_day) / 6 == pytest.approx(4.2, rel=0.08)
    repairs = []
    for trace in traces:
        assert trace.up == frozenset(range(400))
        begun = {}
        for change in trace.changes:
            repairs += [change.time - begun.pop(node) for node in change.joined]
            begun |= dict.fromkeys(change.failed, change.time)
    repairs.sort()
    assert repairs[len(repairs) // 2] / 3600 == pytest.approx(20, rel=0.1)
    hit = [len({node for change in trace.changes for node in change.failed}) for trace in traces]
    assert sum(hit) / 6 == pytest.approx(231, rel=0.08)


def test_some_failures_take_several_nodes():
    trace = Generator(days=349, burst=0.05).trace(400)
    sizes = [len(change.failed) for change in trace.changes if change.failed]
    assert 0.03 < sum(size > 1 for size in sizes) / len(sizes) < 0.08
    assert max(sizes) <= 8
    assert {cause for change in trace.changes for cause in change.causes.values()} <= CAUSES.keys()


def test_slow_periods_and_corruption_have_their_rates():
    trace = Generator(days=349, corrupt=0.2, slow=10.0, slow_hours=3.0, slow_factor=1.5).trace(400)
    corrupt = sum(change.is_corruption(change.failed) for change in trace.changes)
    assert corrupt / sum(bool(change.failed) for change in trace.changes) == pytest.approx(0.2, abs=0.05)
    assert len(trace.slow) / (349 * 400) * 1000 == pytest.approx(10, rel=0.05)
    assert sum(end - begin for begin, end, _, _ in trace.slow) / 3600 / len(trace.slow) == pytest.approx(3, rel=0.05)
    assert {factor for *_, factor in trace.slow} == {1.5}
    small = trace.fitted(100)
    assert 0.8 < len(small.slow) / len(trace.slow) * 4 < 1.2
    assert {period.node for period in small.slow} <= set(range(100))


@pytest.mark.parametrize("generator", [Generator(rate=0), Generator(days=0.001)])
def test_trace_without_failures(generator):
    trace = generator.trace(3)
    assert trace.changes == ()
    assert trace.end == generator.days * 86400
