"""The page of a comparison: every resilience system over the same failures."""

from __future__ import annotations

from typing import Any

from dash import Dash, dcc, html

from viz.figures.charts import goodput_figure, lost_figure, rates_figure
from viz.numbers import percent, short
from viz.pages import parts
from viz.pages.page import Page, Workspace

HEAD = ("system", "runs", "goodput", "fault-free", "ETTR")
PAUSES = "Pauses shorter than a thousandth of the time are left out here; below they count."
CAPTION = (
    "All get the same nodes, layers, links, memory, batch, failures and pauses; committed samples count. Fault-scaled"
    " is the fault-free schedule times the mean share of nodes alive."
)


class SystemsPage(Page):
    title = ""

    def __init__(self, workspace: Workspace, place: int = 0) -> None:
        super().__init__(workspace, place)
        self.title, self.comparison = list(workspace.comparisons.items())[place]
        self.prefix = f"systems{place}"

    @classmethod
    def count(cls, workspace: Workspace) -> int:
        return len(workspace.comparisons)

    def layout(self) -> html.Div:
        traces = self.comparison.traces
        if not traces and not self.comparison.tables:
            return html.Div(parts.empty_state("The comparison has no traces.", "Write one with recycle compare."))
        name = self.name("trace")
        options: Any = [
            {"label": f"{trace.name} ({parts.count_text(trace.failures, 'failure')})", "value": place}
            for place, trace in enumerate(traces)
        ]
        chosen = dcc.Dropdown(options, 0, id=name, clearable=False, searchable=False)
        shown = "controls" if len(traces) > 1 else "hidden"
        choice = parts.div(shown, html.Label("Failures", htmlFor=name), chosen)
        content = self.content(0) if traces else []
        return html.Div([*self.tables(), choice, html.Div(content, id=self.name("shown")), self.assumptions()])

    def tables(self) -> list[Any]:
        return [parts.card(each.title, parts.table(each.head, each.rows)) for each in self.comparison.tables]

    def content(self, place: int) -> list[Any]:
        trace, systems = self.comparison.traces[place], self.comparison.results(place)
        facts = [
            self.comparison.shape,
            f"{trace.nodes} nodes",
            f"{trace.seconds / 86400:.3g} days",
            parts.count_text(trace.failures, "failure"),
            f"{percent(trace.live)} alive on average",
        ]
        rows = [
            [
                system.name,
                system.layout,
                system.goodput,
                system.fault_free,
                percent(system.goodput / (system.fault_free or 1.0)),
            ]
            if system.fits
            else [system.name, "does not fit", None, None, None]
            for system in systems
        ]
        best = max(systems, key=lambda system: system.goodput)
        described = {
            f"Goodput; {best.name} has most, {short(best.goodput)} samples per second": goodput_figure(trace, systems),
            "Throughput of each system over time, above the nodes alive": rates_figure(trace, systems),
            "Share of time that each system lost, by cause": lost_figure(systems),
        }
        goodput, rates, lost = (
            parts.figure_view(figure, self.name(f"figure{n}"), text)
            for n, (text, figure) in enumerate(described.items())
        )
        misfits = [html.Li(f"{system.name}: {system.misfit.reason}") for system in systems if system.misfit]
        return [
            parts.chips(facts),
            parts.card(f"Goodput: {trace.name}", goodput, parts.table(HEAD, rows), caption=CAPTION),
            parts.card("Throughput and nodes alive", rates, caption=PAUSES),
            parts.card("Where the time went", lost, caption="The rest is progress at the fault-free rate."),
            *([parts.card("Does not fit into memory", html.Ul(misfits))] if misfits else []),
        ]

    def static_content(self) -> list[Any]:
        places = range(len(self.comparison.traces))
        shown = [*self.tables(), *(part for place in places for part in self.content(place))]
        return [html.H2(self.title, className="source"), *shown, self.assumptions()] if shown else []

    def assumptions(self) -> Any:
        lines = self.comparison.assumptions
        items = [html.Li(line) for line in lines]
        return html.Details([html.Summary("Assumptions"), html.Ul(items)], className="card") if lines else html.Div()

    def register(self, app: Dash) -> None:
        content, chosen = self.output("shown"), self.input("trace", "value")

        @app.callback(content, chosen, prevent_initial_call=True)
        def show(place: int) -> list[Any]:
            return self.content(place)
