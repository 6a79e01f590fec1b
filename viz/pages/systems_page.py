"""The page of a comparison: every resilience system over the same failures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dash import Dash, Input, Output, dcc, html

from viz.comparison import SystemComparison
from viz.figures.comparison import goodput_figure, lost_figure, rates_figure
from viz.pages import parts
from viz.pages.figure_view import figure_view
from viz.pages.page import Page, Workspace

HEAD = ("system", "runs", "goodput", "fault-free", "ETTR")
PAUSES = "Pauses shorter than a thousandth of the time are left out here; below they count."
CAPTION = (
    "All get the same nodes, layers, links, memory, batch, failures and pauses; committed samples count. Fault-scaled"
    " is the fault-free schedule times the mean share of nodes alive."
)


class SystemsPage(Page):
    """A comparison, one trace at a time."""

    title = ""

    def __init__(self, comparison: SystemComparison, title: str, prefix: str) -> None:
        self.comparison, self.title, self.prefix = comparison, title, prefix

    @classmethod
    def pages_of(cls, workspace: Workspace) -> Sequence[Page]:
        named = enumerate(workspace.comparisons.items())
        return [cls(comparison, name, f"systems{place}") for place, (name, comparison) in named]

    def layout(self) -> html.Div:
        """The choice of a trace where there are several, and what the first one gives."""
        traces = self.comparison.traces
        options: Any = [{"label": _label(trace.name, trace.failures), "value": n} for n, trace in enumerate(traces)]
        chosen = dcc.Dropdown(options, 0, id=self.name("trace"), clearable=False, searchable=False)
        choice = [html.Div([html.Label("Failures", htmlFor=self.name("trace")), chosen], className="controls")]
        if not traces:
            return html.Div(parts.empty("The comparison holds no trace.", "Write one with recycle compare."))
        hidden = "" if len(traces) > 1 else "hidden"
        return html.Div(
            [html.Div(choice, className=hidden), html.Div(self.shown(0), id=self.name("shown")), self.assumptions()]
        )

    def shown(self, place: int) -> list[Any]:
        """Figures and table of a trace."""
        trace, systems = self.comparison.traces[place], self.comparison.of(place)
        facts = [
            self.comparison.shape,
            f"{trace.nodes} nodes",
            f"{trace.seconds / 86400:.3g} days",
            _failures(trace.failures),
            f"{trace.live:.1%} alive on average",
        ]
        ratio = {system.name: system.goodput / system.fault_free for system in systems if system.fault_free}
        rows: list[list[parts.Cell]] = [
            [system.name, system.layout, system.goodput, system.fault_free, f"{ratio.get(system.name, 0.0):.2%}"]
            if system.fits
            else [system.name, "does not fit", None, None, None]
            for system in systems
        ]
        best = max(systems, key=lambda system: system.goodput)
        spoken = f"Goodput by system; {best.name} has most, {best.goodput:.4g} samples per second"
        figures = {
            "goodput": (goodput_figure(trace, systems), spoken),
            "rates": (rates_figure(trace, systems), "Throughput of each system over time, above the nodes alive"),
            "lost": (lost_figure(systems), "Share of time that each system lost, by cause"),
        }
        views = {name: figure_view("", figure, self.name(name), spoken) for name, (figure, spoken) in figures.items()}
        misfits = [html.Li(f"{system.name}: {system.misfit.reason}") for system in systems if system.misfit]
        return [
            html.P([html.Span(word) for word in facts], className="chips"),
            parts.card(f"Goodput: {trace.name}", views["goodput"], parts.table(HEAD, rows), caption=CAPTION),
            parts.card("Throughput and nodes alive", views["rates"], caption=PAUSES),
            parts.card("Where the time went", views["lost"], caption="The rest is progress at the fault-free rate."),
            *([parts.card("Does not fit into memory", html.Ul(misfits))] if misfits else []),
        ]

    def assumptions(self) -> Any:
        """What the profile rests on, folded away."""
        lines = self.comparison.assumptions
        items = [html.Li(line) for line in lines]
        return html.Details([html.Summary("Assumptions"), html.Ul(items)], className="card") if lines else html.Div()

    def register(self, app: Dash) -> None:
        """Add the callback of the choice."""

        shown, chosen = Output(self.name("shown"), "children"), Input(self.name("trace"), "value")

        @app.callback(shown, chosen, prevent_initial_call=True)
        def show(place: int) -> list[Any]:
            return self.shown(place)


def _label(name: str, failures: int) -> str:
    return f"{name} ({_failures(failures)})"


def _failures(count: int) -> str:
    return f"{count} failure{'s' * (count != 1)}"
