"""Exports the metrics of a run to Prometheus and OpenTelemetry.

In training a child process does this, and reads the run directory: neither a scrape nor a collector that is slow takes
time from the leader. `python -m recycle.runs.exporter PARENT RUN`, with a `Request` on standard input, answers with an
error or "" once it serves; a second line on standard input, or its end, ends it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from recycle.child import serve
from recycle.errors import JobError, RecycleError, first_line
from recycle.runs.metrics import RUN_METRICS, Value
from recycle.runs.read_report import RunReader, RunRecord

FRESH_SECONDS = 1.0
"""Seconds during which all metrics are of one read of the run directory."""
PUSH_SECONDS = 15.0
"""Interval at which metrics are sent to OpenTelemetry."""


class Request(msgspec.Struct, frozen=True):
    """What to export: (address, port) to serve Prometheus at, URL of an OpenTelemetry collector; None for neither."""

    prometheus: tuple[str, int] | None = None
    otlp: str | None = None


class LatestRecord:
    """The newest record of a run, read at most once in `FRESH_SECONDS`; an unreadable file keeps the last one."""

    def __init__(self, run_dir: Path) -> None:
        self._reader, self._lock = RunReader(run_dir), threading.Lock()
        self._record: RunRecord | None = None
        self._read_at = float("-inf")

    def expire(self) -> None:
        """Have the next call read the run directory."""
        self._read_at = float("-inf")

    def __call__(self) -> RunRecord | None:
        with self._lock:
            if time.monotonic() - self._read_at >= FRESH_SECONDS:
                try:
                    self._record = self._reader.read()
                except RecycleError as error:
                    print(error, file=sys.stderr, flush=True)
                self._read_at = time.monotonic()
            return self._record


class PrometheusCollector:
    """All metrics of a run, as prometheus_client asks for them; `read` returns the record, or None."""

    def __init__(self, read: Callable[[], RunRecord | None]) -> None:
        self._read = read

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        record = self._read()
        for metric in RUN_METRICS if record is not None else ():
            assert record is not None
            kind = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
            family = kind(metric.name, metric.help, labels=("run", *metric.labels))
            for labels, value in metric.values(record):
                family.add_metric((record.name, *labels), value)
            yield family


def registry_of(read: Callable[[], RunRecord | None]) -> Any:
    """Return a registry with all metrics. Raises JobError if prometheus-client is not installed."""
    try:
        from prometheus_client import CollectorRegistry
    except ImportError:
        raise JobError("the metrics need a package; install it with: pip install 'recycle-pipeline[logging]'") from None
    registry = CollectorRegistry(auto_describe=False)
    registry.register(PrometheusCollector(read))
    return registry


def exposition(record: RunRecord) -> str:
    """Return the metrics in Prometheus' text format. Raises JobError if prometheus-client is not installed."""
    registry = registry_of(lambda: record)
    from prometheus_client import generate_latest

    return str(generate_latest(registry), "utf-8")


def _push_to(endpoint: str, read: Callable[[], RunRecord | None]) -> Any:
    """Start to send all metrics to a collector; return the provider, whose `shutdown` sends the last ones."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.metrics import Observation
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource

    exporter = OTLPMetricExporter(endpoint=f"{endpoint.rstrip('/')}/v1/metrics")
    reader = PeriodicExportingMetricReader(exporter, export_interval_millis=1000 * PUSH_SECONDS)
    provider = MeterProvider([reader], Resource.create({"service.name": "recycle"}))
    meter = provider.get_meter("recycle")
    for metric in RUN_METRICS:

        def observe(
            _: object,
            names: tuple[str, ...] = metric.labels,
            values: Callable[[RunRecord], Iterable[Value]] = metric.values,
        ) -> Iterator[Any]:
            record = read()
            for labels, value in values(record) if record is not None else ():
                assert record is not None
                yield Observation(value, {"run": record.name, **dict(zip(names, labels, strict=True))})

        create = meter.create_observable_counter if metric.is_counter else meter.create_observable_gauge
        create(metric.name, callbacks=[observe], description=metric.help)
    return provider


def main(parent: str, run: str) -> None:
    requests, answers = serve(parent)
    request = msgspec.json.decode(requests.readline(), type=Request)
    latest, provider, problem, where = LatestRecord(Path(run)), None, "", ""
    try:
        if request.prometheus is not None:
            from prometheus_client import start_http_server

            address, port = request.prometheus
            where = f"{address}:{port}"
            start_http_server(port, address, registry_of(latest))
        if request.otlp is not None:
            provider = _push_to(request.otlp, latest)
    except OSError as error:
        problem = f"{where}: {error.strerror}"
    except Exception as error:  # any exception of OpenTelemetry
        problem = f"{type(error).__name__}: {first_line(error)}"
    answers.write(msgspec.json.encode(problem) + b"\n")
    if not problem:
        requests.readline()
    if provider is not None:
        latest.expire()
        provider.shutdown(timeout_millis=1000 * FRESH_SECONDS)


if __name__ == "__main__":
    main(*sys.argv[1:])
