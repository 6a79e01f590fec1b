"""The dashboard and the alert rules name metrics, labels and kinds of events that exist, in valid PromQL."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from recycle.job.endpoints import parse_listening
from recycle.runs.metrics import EVENT_KINDS, RUN_METRICS
from recycle.runs.report import CHANGES
from tests import ROOT

promql = pytest.importorskip("promql_parser", reason="no promql-parser: install recycle-pipeline[test]")
yaml = pytest.importorskip("yaml", reason="no PyYAML: install recycle-pipeline[test]")

FOLDER = ROOT / "examples" / "monitoring"
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text())
RULES = [rule for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]
LABELS = {metric.name: {"run", *metric.labels} for metric in RUN_METRICS}


def selectors(expression: str):
    """The parts of an expression that select a metric; parsing fails on what is not PromQL."""
    pending = [promql.parse(expression.replace("$run", "run"))]
    while pending:
        part = pending.pop()
        if isinstance(part, promql.VectorSelector):
            yield part
        for name in ("expr", "lhs", "rhs", "vector_selector", "param"):
            if (inner := getattr(part, name, None)) is not None:
                pending.append(inner)
        pending.extend(getattr(part, "args", ()))


def expressions() -> Iterator[tuple[str, str]]:
    for panel in DASHBOARD["panels"]:
        yield from ((panel["title"], target["expr"]) for target in panel["targets"])
    yield from (("annotation", each["expr"]) for each in DASHBOARD["annotations"]["list"])
    yield from ((rule["alert"], rule["expr"]) for rule in RULES)


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_expression_selects_existing_metrics_and_labels(where, expression):
    found = list(selectors(expression))
    assert found
    assert len(found) == len(re.findall(r"\brecycle_\w+", expression))
    for selector in found:
        for matcher in selector.matchers.matchers:
            assert matcher.name in LABELS[selector.name]
            if matcher.name == "kind":
                kinds = EVENT_KINDS if selector.name == "recycle_events_total" else CHANGES
                assert matcher.value in kinds


def test_panels_show_existing_labels_and_do_not_overlap():
    cells = set()
    for panel in DASHBOARD["panels"]:
        labels = set.union(*(LABELS[each.name] for target in panel["targets"] for each in selectors(target["expr"])))
        shown = [name for target in panel["targets"] for name in re.findall(r"{{(\w+)}}", target["legendFormat"])]
        for change in panel.get("transformations", ()):
            shown += change["options"]["include"]["names"]
        assert set(shown) <= labels | {"Value"}
        place = panel["gridPos"]
        columns, rows = (range(place[at], place[at] + place[size]) for at, size in ("xw", "yh"))
        covers = {(x, y) for x in columns for y in rows}
        assert not covers & cells
        assert place["x"] + place["w"] <= 24
        cells |= covers
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_alerts_are_distinct_and_name_labels_of_their_metrics():
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        labels = set.union(*(LABELS[each.name] for each in selectors(rule["expr"])))
        assert set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) <= labels
        assert rule["labels"]["severity"] in ("info", "warning", "critical")


def test_scrape_configuration_uses_the_port_of_the_guide():
    guide = (FOLDER.parents[1] / "docs" / "guides" / "monitoring.md").read_text()
    (port,) = re.findall(r"^ +prometheus = (\d+)", guide, flags=re.MULTILINE)
    config = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    assert all((FOLDER / file).is_file() for file in config["rule_files"])
    targets = [target for each in config["scrape_configs"] for of in each["static_configs"] for target in of["targets"]]
    assert [parse_listening(target)[1] for target in targets] == [int(port)]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool: install Prometheus")
def test_prometheus_accepts_the_configuration_and_the_rules():
    command = ["promtool", "check", "config", str(FOLDER / "prometheus.yaml")]
    assert subprocess.run(command, capture_output=True).returncode == 0
