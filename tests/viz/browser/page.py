"""A served application, and a page with one timeline in a real browser."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from dash import Dash

from viz.app import build_app, serve
from viz.sources import load_sources

NAME = "schedules-0"
VIEW = f"recycle.views.get('{NAME}')"
PIXEL = """([x, y]) => {
  const {left, top} = VIEW.place, ratio = devicePixelRatio;
  const at = VIEW.context.getImageData(Math.floor((left + x) * ratio), Math.floor((top + y) * ratio), 1, 1).data;
  return '#' + [...at.slice(0, 3)].map(c => c.toString(16).padStart(2, '0')).join('').toUpperCase();
}""".replace("VIEW", VIEW)
SHOW = """window_ => { VIEW.show(window_); return new Promise(done => {
  const look = () => VIEW.asked ? requestAnimationFrame(look) : done(VIEW.level);
  requestAnimationFrame(() => requestAnimationFrame(look));
}); }""".replace("VIEW", VIEW)


def complaints_of(page: Any) -> list[str]:
    """What a page will write to the console and raise, without what chromium says only if the machine is slow."""
    complaints: list[str] = []

    def note(text: str) -> None:
        if "was preloaded using link preload but not used within a few seconds" not in text:
            complaints.append(text)

    page.on("console", lambda message: note(message.text))
    page.on("pageerror", lambda error: note(str(error)))
    return complaints


class Held:
    """Requests of a page that are held until they are continued: the first ones for a place, with a word in them."""

    def __init__(self, page: Any, place: str, word: str = "", most: int = 99) -> None:
        self.page, self.place, self.word, self.most = page, place, word, most
        self.routes: list[Any] = []
        page.route(place, self._hold)

    def _hold(self, route: Any) -> None:
        if self.word in (route.request.post_data or "") and len(self.routes) < self.most:
            self.routes.append(route)
        else:
            route.continue_()

    def __getitem__(self, place: int) -> Any:
        for _ in range(500):
            if len(self.routes) > place:
                break
            self.page.wait_for_timeout(20)
        return self.routes[place]

    def end(self, *order: int) -> None:
        """Continue requests in an order, each after the answer to the one before, and hold no others."""
        for place in order:
            with self.page.expect_response(lambda answer, place=place: answer.request == self.routes[place].request):
                self.routes[place].continue_()
        self.page.unroute(self.place)


class Page:
    """A page with one timeline, what it asked the server for, and what it complained of."""

    def __init__(self, page: Any, address: str) -> None:
        self.page, self.address = page, address
        self.requests: list[str] = []
        self.complaints = complaints_of(page)
        page.on("request", self._asked)
        self.open("")

    def open(self, query: str) -> None:
        self.page.goto(self.address + query)
        self.page.wait_for_selector(".lanes-view[data-drawn]")
        self.page.wait_for_selector("#headline strong")  # what a page asks for last
        self.requests.clear()

    def _asked(self, request: Any) -> None:
        if "_favicon" not in request.url:  # chromium looks at it again whenever the address changes
            self.requests.append(request.url)

    def __call__(self, script: str, argument: Any = None) -> Any:
        return self.page.evaluate(script, argument)

    def show(self, **window: float) -> int:
        """Show a window; returns the level of detail that it is drawn at."""
        level: int = self(SHOW, window)
        return level

    def press(self, *keys: str, select: str = "") -> str:
        """Press keys, with an instruction selected before; gives the line below the lanes."""
        if select:
            self(f"text => {VIEW}.select(recycle.search({VIEW}.table, text)[0])", select)
        for key in keys:
            self.page.keyboard.press(key)
        self.page.wait_for_function(f"() => !{VIEW}.asked")
        return self.status()

    def drag(self, begin: tuple[float, float], end: tuple[float, float]) -> None:
        """From one (time, row) to another."""
        self.drag_pixels(self.point(*begin), self.point(*end))

    def drag_pixels(self, begin: tuple[float, float], end: tuple[float, float]) -> None:
        self.page.mouse.move(*begin)
        self.page.mouse.down()
        self.page.mouse.move(*end, steps=4)
        self.page.mouse.up()

    def at(self, t: float, y: float) -> tuple[float, float]:
        """Place within the axes, in pixels, of a time and a row."""
        x, down = self(
            f"([t, y]) => {{ const v = {VIEW}.view, p = {VIEW}.place;"
            " return [(t - v.t0) / (v.t1 - v.t0) * p.width, (y - v.y0) / (v.y1 - v.y0) * p.height]; }",
            [t, y],
        )
        return x, down

    def colour(self, t: float, y: float) -> str:
        colour: str = self(PIXEL, list(self.at(t, y)))
        return colour

    def point(self, t: float, y: float) -> tuple[float, float]:
        """The same on the page, for the mouse."""
        self(f"() => {VIEW}.root.scrollIntoView()")
        left, top = self(
            f"() => {{ const box = {VIEW}.overlay.getBoundingClientRect(), {{left, top}} = {VIEW}.place;"
            " return [box.left + left, box.top + top]; }"
        )
        x, down = self.at(t, y)
        return left + x, top + down

    def status(self) -> str:
        return str(self(f"() => {VIEW}.status.textContent"))


def served(*paths: Path, app: Dash | None = None) -> str:
    """The address of an application that shows `paths`, or of `app`, served until the tests end."""
    ready, addresses = threading.Event(), []

    def on_ready(address: str) -> None:
        addresses.append(address)
        ready.set()

    app = app or build_app(load_sources(paths))
    threading.Thread(target=serve, args=(app, 0, on_ready), daemon=True).start()
    assert ready.wait(30)
    return addresses[0]
