"""Real runs export their metrics: scraped over HTTP while they train, and sent to an OpenTelemetry collector."""

import json
import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from recycle.exec.launch.trackers import MetricsExport, Observer, Trackers
from recycle.runs.exporter import exposition
from recycle.runs.read_report import RunReader
from tests.exec.etcd_server import LOOPBACK
from tests.exec.runs import job
from tests.waiting import until

parser = pytest.importorskip("prometheus_client.parser")
pytestmark = pytest.mark.process

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
"""(name, labels but for `run`) -> value."""


def samples(text: str) -> Samples:
    families = parser.text_string_to_metric_families(text)
    return {
        (sample.name, frozenset(sample.labels.items() - {("run", sample.labels["run"])})): sample.value
        for family in families
        for sample in family.samples
    }


def scrape(port: int) -> Samples:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return samples(answer.read().decode())


def scrape_once_served(port: int) -> Samples:
    deadline = time.monotonic() + 30
    while True:
        try:
            return scrape(port)
        except (URLError, ConnectionError):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def value(found: Samples, name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


class Scraping(Observer):
    """Scrapes when a step was committed, before the next one can be."""

    def __init__(self, port: int, step: int):
        self._port, self._step = port, step
        self.found = {}
        self.line = {}

    def committed(self, line):
        if line["step"] == self._step:
            self.found, self.line = scrape_once_served(self._port), line


class Collector:
    """An OpenTelemetry collector; `sent` has the last value of each metric with its attributes."""

    def __init__(self):
        self.sent = {}

    def take(self, body: bytes):
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
                data = metric.sum if metric.HasField("sum") else metric.gauge
                for point in data.data_points:
                    labels = {each.key: each.value.string_value for each in point.attributes if each.key != "run"}
                    self.sent[metric.name, frozenset(labels.items())] = point.as_double


@contextmanager
def serving(collector: Collector) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            assert self.path == "/v1/metrics"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            collector.take(body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            return

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_metrics_of_a_real_run_are_its_report(launch):
    """tests/runs/test_metrics.py has the values."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    port, collector = LOOPBACK.free_port(), Collector()
    scraping = Scraping(port, 4)
    with serving(collector) as url:
        run = launch(
            job(2, 2, 2, kind="emulated", logging={"prometheus": port, "otlp": url}), 6, "kill:1.1@2", observer=scraping
        )
    live, line = scraping.found, scraping.line
    assert value(live, "recycle_step") == 4
    for key in "loss", "grad_norm", "tokens_per_second", "live_workers":
        name = {"grad_norm": "gradient_norm"}.get(key, key)
        assert value(live, f"recycle_{name}") == line[key]
    assert line["live_workers"] == 3
    assert value(live, "recycle_worker_dead", worker="1.1", cause="killed by SIGKILL") == 1
    assert value(live, "recycle_rank_live_workers", rank="1") == 1
    assert value(live, "recycle_events_total", kind="detected") == 1
    assert value(live, "recycle_events_total", kind="restored") == 0
    record, again = RunReader(run.directory).read(), LOOPBACK.free_port()
    export = MetricsExport(job(2, 2, 2, kind="emulated", logging={"prometheus": again}), run.directory)
    export.start(0)
    served = scrape(again)
    export.close()
    assert served == samples(exposition(record))
    # What the collector got last, when the run ended: all but the seconds of the end itself.
    assert {key for key in collector.sent if not key[0].endswith("seconds")} == {
        key for key in served if not key[0].endswith("seconds")
    }
    for key in ("recycle_step", frozenset[Any]()), ("recycle_events_total", frozenset({("kind", "recovered")})):
        assert collector.sent[key] == served[key] > 0
    assert math.isclose(collector.sent["recycle_loss", frozenset()], run.losses[-1])


def test_port_in_use_is_a_warning_and_training_continues(tmp_path):
    (tmp_path / "logs").mkdir()
    warned = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        trackers = Trackers(job(2, 2, 2, logging={"prometheus": port}), tmp_path, 0, warned.append)
        trackers._thread.submit(lambda: None).result()
        for step in range(2):
            trackers.committed({"step": step, "tokens_per_second": 1.0, "live_workers": 4})
        trackers.close()
    assert len(warned) == 1
    assert f"127.0.0.1:{port}: Address already in use" in warned[0]


def test_metrics_end_with_the_run_and_wait_for_its_files(tmp_path):
    (tmp_path / "logs").mkdir()
    port = LOOPBACK.free_port()
    config = job(2, 2, 2, logging={"prometheus": port})
    export = MetricsExport(config, tmp_path)
    export.start(0)
    assert scrape(port) == {}  # job.toml is not written yet
    (tmp_path / "job.toml").write_text(config.to_toml())
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 3, "time": 1.0, "loss": 0.5}) + "\n")
    until(lambda: scrape(port))
    assert value(scrape(port), "recycle_loss") == 0.5
    export.close()
    with pytest.raises(URLError, match="refused"):
        scrape(port)
