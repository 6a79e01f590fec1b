"""The viewer at scale, in headless Chromium: a million instructions on 1,536 lanes, four million, and a Plotly peer.

    python benchmarks/viewer.py [--rounds N] [--only million|four|bars|times|edits|exported]

The peer draws one Plotly bar per instruction, as public viewers do. The server is `recycle view FILE`. First paint is
the time from the start of the navigation to the frame with all lanes and axes: cold in a fresh browser, warm on a
second visit. A step is the time from the call that requests a new window to the second frame after it is drawn;
windows run from everything to half a percent of 64 lanes and back. Hover is the page's time for one pointer movement.
Browser CPU seconds are those of all of Chromium's processes; they distinguish a busy machine from a slow page. Other
times: from a key in a field of the scenario panel to the frame after the one that draws the lanes with these times,
their headline and critical path, at a hundred thousand instructions. An edit: from the key that moves an instruction to
the frame after the one that draws its lanes, findings and headline, at ten thousand instructions. Both are medians of
the faster half, because the machine is shared. The exit status is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from recycle import Profile, Shape, simulate
from recycle.ir.families import one_f_one_b
from viz.export import export
from viz.sources import schedule_source

ROOT = Path(__file__).parent.parent
MILLION, FOUR = Shape(96, 16, 326), Shape(96, 16, 1302)
HUNDRED_THOUSAND = Shape(32, 16, 98)
TEN = [Shape(4, 16, 78 + place) for place in range(10)]
"""Ten schedules of a hundred thousand instructions in all."""
BARS = (Shape(4, 4, 32), Shape(8, 8, 79))
"""1,024 and 10,112 instructions, a forward and a backward each."""
VIEWPORT = {"width": 1400, "height": 1000}
TARGETS = {
    "first paint cold s": 1.5,
    "first paint warm s": 0.5,
    "zoom step ms": 60.0,
    "pan step ms": 60.0,
    "hover ms": 5.0,
    "server MB": 1000.0,
    "requests in steps": 0.0,
    "other times ms": 100.0,
    "edit ms": 50.0,
    "exported MB": 20.0,
    "exported, opens in s": 3.0,
}
READY = """() => new Promise(done => {
  const look = () => {
    const view = window.recycle && window.recycle.active;
    if (!view || !view.drawn) return requestAnimationFrame(look);
    requestAnimationFrame(() => setTimeout(() => done(performance.now() / 1000)));
  };
  look();
})"""
STEP = """window_ => new Promise(done => {
  const view = window.recycle.active, drawn = view.drawn, began = performance.now();
  const look = () => {
    if (view.drawn === drawn || view.asked) return requestAnimationFrame(look);
    requestAnimationFrame(() => done([performance.now() - began, view.seconds * 1000, view.level]));
  };
  view.show(window_);
  requestAnimationFrame(look);
})"""
OTHER_TIMES = """text => new Promise(done => {
  const views = [...window.recycle.views.values()], before = views.map(view => view.root.dataset.address);
  const began = performance.now();
  const field = document.querySelector('.retime [data-field=F] input');
  Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, 'value').set.call(field, text);
  field.dispatchEvent(new Event('input', { bubbles: true }));
  const look = () => {
    if (views.some((view, place) => view.root.dataset.address === before[place])) return requestAnimationFrame(look);
    requestAnimationFrame(() => done(performance.now() - began)); // this frame draws them
  };
  look();
})"""
EDIT = """key => new Promise(done => {
  const view = window.recycle.active, before = view.root.dataset.address, began = performance.now();
  document.body.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true }));
  const look = () => {
    if (view.root.dataset.address === before) return requestAnimationFrame(look);
    requestAnimationFrame(() => done(performance.now() - began)); // this frame draws the lanes
  };
  look();
})"""
BAR_STEP = """range => new Promise(done => {
  const plot = document.querySelector('.js-plotly-plot'), began = performance.now();
  Plotly.relayout(plot, {'xaxis.range': range}).then(() =>
    requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - began))));
})"""
BAR_PAINTED = """() => new Promise(done => {
  const look = () => {
    if (!document.querySelector('.js-plotly-plot .trace.bars .point')) return requestAnimationFrame(look);
    requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() / 1000)));
  };
  look();
})"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="browsers started, and visits counted")
    parser.add_argument("--only", choices=("million", "four", "bars", "times", "edits", "exported"))
    arguments = parser.parse_args()
    missed = False
    with tempfile.TemporaryDirectory() as folder:
        for name, shape in (("million", MILLION), ("four", FOUR)):
            if arguments.only in (None, name):
                figures = canvas(Path(folder) / f"{name}.json", shape, arguments.rounds)
                missed |= tell(name, figures, name == "million")
        if arguments.only in (None, "times"):
            for title, shapes in (("other times", [HUNDRED_THOUSAND]), ("other times of ten", TEN)):
                missed |= tell(title, other_times(Path(folder), shapes, arguments.rounds))
        if arguments.only in (None, "edits"):
            missed |= tell("edits", edits(Path(folder) / "edited.json", BARS[1], arguments.rounds))
        if arguments.only in (None, "exported"):
            missed |= tell("exported", exported(Path(folder) / "exported.html", arguments.rounds))
        if arguments.only in (None, "bars"):
            for shape in BARS:
                tell("one Plotly bar per instruction", bars(shape, Path(folder) / "bars.html", arguments.rounds), False)
    return int(missed)


def tell(title: str, figures: dict[str, float], targets: bool = True) -> bool:
    """Print the figures; whether one misses its target."""
    print(f"\n{title}: {figures.pop('instructions'):,.0f} instructions on {figures.pop('lanes'):,.0f} lanes")
    missed = False
    for name, value in figures.items():
        target = TARGETS.get(name) if targets else None
        late = target is not None and value > target
        missed |= late
        held = "" if target is None else f"   target {target:g}{'  MISSED' if late else ''}"
        print(f"  {name:<42}{value:>10.3f}{held}", flush=True)
    return missed


def canvas(path: Path, shape: Shape, rounds: int) -> dict[str, float]:
    """Figures of the canvas for a 1F1B schedule of `shape`."""
    schedule = one_f_one_b(shape)
    schedule.save(path)
    figures: dict[str, float] = {"instructions": len(schedule.columns), "lanes": shape.worker_count}
    began = time.monotonic()
    with served(path) as (server, address):
        figures["server ready s (reads, checks, simulates)"] = time.monotonic() - began
        cold, warm, spent = [], [], []
        for _ in range(rounds):
            with chromium() as browser:
                page = browser.page()
                used = browser.cpu_seconds()
                cold.append(visit(page, address))
                spent.append(browser.cpu_seconds() - used)
                warm += [visit(page, address) for _ in range(2)]
        figures["first paint cold s"] = statistics.median(cold)
        figures["first paint warm s"] = statistics.median(warm)
        figures["first visit, browser CPU s"] = statistics.median(spent)
        with chromium() as browser:
            figures |= looking_around(browser, address, shape)
        figures["server MB"] = memory(server, "VmRSS")
        figures["server MB at its peak, while loading"] = memory(server, "VmHWM")
    return figures


def visit(page: Any, address: str) -> float:
    """First paint in seconds from the start of the navigation."""
    page.goto(address, wait_until="commit")
    painted: float = page.evaluate(READY)
    page.wait_for_load_state("networkidle")
    return painted


def looking_around(browser: Browser, address: str, shape: Shape) -> dict[str, float]:
    """Steps of zoom and pan, hover, and what they ask of the server."""
    page = browser.page()
    page.goto(address)
    page.evaluate(READY)
    page.wait_for_load_state("networkidle")
    span, lanes = page.evaluate("() => window.recycle.active.span"), shape.worker_count
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url) if "_favicon" not in request.url else None)
    shares = [1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005]
    windows = [
        {"t0": 0.4 * span * (1 - share), "t1": 0.4 * span * (1 - share) + share * span, "y0": 0, "y1": rows}
        for share, rows in zip(shares, (lanes, lanes, lanes / 2, lanes / 4, lanes / 6, lanes / 12, 64, 64), strict=True)
    ]
    used = browser.cpu_seconds()
    first = [page.evaluate(STEP, window) for window in windows]
    again = [[page.evaluate(STEP, window)[0] for window in reversed(windows)][::-1] for _ in range(3)]
    cpu = (browser.cpu_seconds() - used) / (len(windows) * 4)
    best = [min(times) for times in zip(*again, strict=True)]
    pans = []
    for share, rows in ((1.0, lanes / 2), (0.1, lanes / 4), (0.01, 64)):
        for place in range(10):
            begin = 0.3 * span * (1 - share) + 0.02 * place * share * span
            window = {"t0": begin, "t1": begin + share * span * 0.9, "y0": place, "y1": place + rows}
            pans.append(page.evaluate(STEP, window)[0])
    hovers = []
    for window in (windows[0], windows[-1]):
        page.evaluate(STEP, window)
        for move in range(40):
            page.mouse.move(400 + 20 * move, 300 + 8 * move)
            hovers.append(page.evaluate("() => window.recycle.active.hoverSeconds * 1000"))
    page.wait_for_timeout(500)
    return {
        "zoom step ms": statistics.median(best),
        "zoom step ms, longest of the best of 3": max(best),
        "zoom step ms, longest of the first pass": max(step[0] for step in first),
        "zoom step, drawing alone ms, longest": max(step[1] for step in first),
        "zoom step, browser CPU ms": 1000 * cpu,
        "pan step ms": statistics.median(pans),
        "pan step ms, longest": max(pans),
        "hover ms": max(hovers),
        "requests in steps": len(requests),
    }


def other_times(folder: Path, shapes: Sequence[Shape], rounds: int) -> dict[str, float]:
    """How long the lanes of schedules in other times take, typed into the panel of the scenario."""
    paths = [folder / f"times-{place}.json" for place in range(len(shapes))]
    schedules = [one_f_one_b(shape) for shape in shapes]
    for path, schedule in zip(paths, schedules, strict=True):
        schedule.save(path)
    with served(*paths) as (server, address), chromium() as browser:
        page = browser.page()
        page.goto(f"{address}?pages=schedules&panel=scenario")
        page.evaluate(READY)
        page.wait_for_selector(".retime [data-field=F] input")
        page.wait_for_load_state("networkidle")
        first = page.evaluate(OTHER_TIMES, "1.5")
        used = _ticks(server), browser.cpu_seconds()
        taken = [page.evaluate(OTHER_TIMES, f"{1 + step / 100}") for step in range(1, 5 * rounds + 1)]
        asked = (_ticks(server) - used[0]) / os.sysconf("SC_CLK_TCK"), browser.cpu_seconds() - used[1]
    return {
        "instructions": sum(len(schedule.columns) for schedule in schedules),
        "lanes": sum(shape.worker_count for shape in shapes),
        "other times ms": faster_half(taken),
        "other times ms, shortest": min(taken),
        "other times ms, longest": max(taken),
        "other times, server CPU ms": 1000 * asked[0] / len(taken),
        "other times, browser CPU ms": 1000 * asked[1] / len(taken),
        "other times ms, the first, which compiles": first,
    }


def edits(path: Path, shape: Shape, rounds: int) -> dict[str, float]:
    """How long an instruction that moves back and forth in its worker's program takes to show all that follows."""
    schedule = one_f_one_b(shape)
    schedule.save(path)
    with served(path) as (server, address), chromium() as browser:
        page = browser.page()
        page.goto(address)
        page.evaluate(READY)
        page.wait_for_load_state("networkidle")
        page.evaluate("() => { const v = window.recycle.active; v.select(v.table.offsets[4] - 40, true); }")
        first, used = page.evaluate(EDIT, ">"), (_ticks(server), browser.cpu_seconds())
        taken = [page.evaluate(EDIT, key) for key in "<>" * 4 * rounds]
        spent = (_ticks(server) - used[0]) / os.sysconf("SC_CLK_TCK"), browser.cpu_seconds() - used[1]
    return {
        "instructions": len(schedule.columns),
        "lanes": shape.worker_count,
        "edit ms": faster_half(taken),
        "edit ms, longest": max(taken),
        "edit, server CPU ms": 1000 * spent[0] / len(taken),
        "edit, browser CPU ms": 1000 * spent[1] / len(taken),
        "edit ms, the first, which compiles": first,
    }


def faster_half(taken: Sequence[float]) -> float:
    """The median of the faster half."""
    return statistics.median(sorted(taken)[: (len(taken) + 1) // 2])


def exported(path: Path, rounds: int) -> dict[str, float]:
    """Size of a million instructions in one file, and how long a browser takes to draw them.

    Each worker has its own pace, so that times hardly repeat: lanes of equal workers would shrink to a twentieth.
    """
    schedule, pace = one_f_one_b(MILLION), random.Random(1)
    speed = {str(worker): 1 + 0.2 * pace.random() for worker in schedule.live}
    began = time.monotonic()
    export(path, [schedule_source(Path("1f1b.json"), schedule, Profile(speed=speed))])
    written, opened, spent = time.monotonic() - began, [], []
    for _ in range(rounds):
        with chromium() as browser:
            page = browser.page()
            used = browser.cpu_seconds()
            page.goto(path.as_uri(), wait_until="commit")
            opened.append(page.evaluate(READY))
            spent.append(browser.cpu_seconds() - used)
    return {
        "instructions": len(schedule.columns),
        "lanes": MILLION.worker_count,
        "exported MB": path.stat().st_size / 1e6,
        "written in s (checks, simulates)": written,
        "exported, opens in s": statistics.median(opened),
        "exported, browser CPU s": statistics.median(spent),
    }


def bars(shape: Shape, path: Path, rounds: int) -> dict[str, float]:
    """Figures of one bar per instruction with its text, a trace per kind."""
    import plotly.graph_objects as go

    timeline = simulate(one_f_one_b(shape))
    schedule = timeline.schedule
    c = schedule.columns
    figure = go.Figure()
    drawn = 0
    for kind, colour in ((0, "#0072B2"), (1, "#009E73")):
        rows = [row for row in range(len(c)) if c.kind[row] == kind]
        drawn += len(rows)
        figure.add_bar(
            orientation="h",
            base=timeline.start[rows],
            x=(timeline.end - timeline.start)[rows],
            y=c.worker[rows],
            width=0.8,
            text=[str(schedule.instruction(row)) for row in rows],
            marker_color=colour,
            textposition="inside",
        )
    figure.update_layout(barmode="overlay", height=780, showlegend=False)
    figure.write_html(path, include_plotlyjs=True)
    paints, steps, spent = [], [], []
    with chromium() as browser:
        for _ in range(rounds):
            page = browser.page()
            page.goto(path.as_uri(), wait_until="commit")
            paints.append(page.evaluate(BAR_PAINTED))
            used = browser.cpu_seconds()
            for share in (0.5, 0.2, 0.1):
                steps.append(page.evaluate(BAR_STEP, [0, share * timeline.makespan]))
            spent.append((browser.cpu_seconds() - used) / 3)
            page.close()
    return {
        "instructions": drawn,
        "lanes": shape.worker_count,
        "first paint s, from a file": statistics.median(paints),
        "zoom step ms": statistics.median(steps),
        "zoom step, browser CPU ms": 1000 * statistics.median(spent),
    }


@contextmanager
def served(*paths: Path) -> Iterator[tuple[int, str]]:
    """`recycle view` of files: (process, address)."""
    program = [sys.executable, "-c", "from recycle.cli import main; main()"]
    command = [*program, "view", *map(str, paths), "--port", "0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        yield process.pid, process.stdout.readline().split()[0]
    finally:
        process.terminate()
        process.wait()


def memory(process: int, what: str) -> float:
    """A line of a process's status, in MB."""
    line = next(line for line in Path(f"/proc/{process}/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) / 1000


class Browser:
    """A Chromium, and the CPU time of all its processes."""

    def __init__(self, browser: Any, before: set[int]) -> None:
        self.browser = browser
        self.before = before

    def page(self) -> Any:
        return self.browser.contexts[0].new_page()

    def cpu_seconds(self) -> float:
        """User and system time so far of every Chromium process that this one started."""
        return sum(_ticks(process) for process in _chromiums() - self.before) / os.sysconf("SC_CLK_TCK")


def _chromiums() -> set[int]:
    """Chromium processes below this one."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, rest = status.read_text().rsplit(")", 1)
        except OSError:
            continue
        parents[int(status.parent.name)] = int(rest.split()[1])
        names[int(status.parent.name)] = name
    found = set()
    for process in parents:
        above = process
        while above > 1 and above != os.getpid():
            above = parents.get(above, 0)
        if above == os.getpid() and "chrom" in names[process]:
            found.add(process)
    return found


def _ticks(process: int) -> int:
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser that was just started, with nothing cached."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium")
    if path is None:
        sys.exit("chromium is not installed: apt-get install chromium")
    before = _chromiums()
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        browser.new_context(viewport=VIEWPORT)
        try:
            yield Browser(browser, before)
        finally:
            browser.close()


if __name__ == "__main__":
    sys.exit(main())
