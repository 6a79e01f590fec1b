"""Graphs with one time axis: what is zoomed in one is zoomed in all, in the browser and without the server.

Everything inside an element of class `linked` follows. `goto` is a store whose value `{"begin", "end", "lane"}` zooms
all of them there and frames the lane in the graph with `"graph"` as its place among them.
"""

from __future__ import annotations

from typing import Any

from dash import ALL, Dash, Input, Output, dcc, html

_FOLLOW = """
function (relayouts, place) {
  const all = dash_clientside.callback_context.triggered.filter(one => one.value);
  const triggered = all.find(one => 'begin' in one.value) || all[0];
  if (!triggered) { return window.dash_clientside.no_update; }
  const root = document.getElementById(%(root)s);
  const graphs = root ? Array.from(root.querySelectorAll('.js-plotly-plot')) : [];
  const value = triggered.value;
  let range = null;
  const goes = 'begin' in value;
  if (goes) { range = [value.begin, value.end]; }
  else if ('xaxis.range[0]' in value) { range = [value['xaxis.range[0]'], value['xaxis.range[1]']]; }
  else if (Array.isArray(value['xaxis.range'])) { range = value['xaxis.range']; }
  if (!range) { return window.dash_clientside.no_update; }
  const near = (a, b) => Math.abs(a - b) <= 1e-6 * Math.abs(range[1] - range[0]);
  graphs.forEach((graph, index) => {
    const now = graph.layout && graph.layout.xaxis ? graph.layout.xaxis.range : null;
    const change = {};
    if (!now || !near(now[0], range[0]) || !near(now[1], range[1])) {
      change['xaxis.range[0]'] = range[0];
      change['xaxis.range[1]'] = range[1];
    }
    if (goes) {
      const others = (graph.layout.shapes || []).filter(shape => shape.name !== 'place');
      const frame = index === value.graph && value.lane !== null ? [{
        name: 'place', type: 'rect', x0: value.from, x1: value.to, y0: value.lane - 0.47, y1: value.lane + 0.47,
        line: {color: '#D55E00', width: 3}, layer: 'above'
      }] : [];
      change.shapes = others.concat(frame);
    }
    if (Object.keys(change).length) { Plotly.relayout(graph, change); }
  });
  if (goes && root) { root.scrollIntoView({block: 'nearest', behavior: 'smooth'}); }
  return window.dash_clientside.no_update;
}
"""


def linked(prefix: str, *children: Any) -> html.Div:
    """A block whose graphs, with identifiers from `graph_id`, share one time axis."""
    return html.Div([*children], id=f"{prefix}-linked", className="linked")


def graph_id(prefix: str, place: int) -> dict[str, Any]:
    """The identifier of the graph at that place."""
    return {"type": f"{prefix}-graph", "place": place}


def stores(prefix: str) -> list[Any]:
    """What the page must hold once, outside of what callbacks replace."""
    return [dcc.Store(id=f"{prefix}-goto"), dcc.Store(id=f"{prefix}-followed")]


def goto(
    begin: float, end: float, span: float, lane: int | None = None, graph: int = 0, scale: float = 1.0
) -> dict[str, Any]:
    """A place for the store: [begin, end] with room around it, on an axis of length `span`."""
    room = max(end - begin, 0.04 * span)
    low, high = begin - 2 * room, end + 2 * room
    return {
        "begin": scale * max(low, -0.004 * span),
        "end": scale * min(high, 1.004 * span),
        "from": scale * begin,
        "to": scale * end,
        "lane": lane,
        "graph": graph,
    }


def register(app: Dash, prefix: str) -> None:
    """Add the callback that makes the graphs follow each other and the store."""
    app.clientside_callback(  # type: ignore[no-untyped-call]
        _FOLLOW % {"root": f"'{prefix}-linked'"},
        Output(f"{prefix}-followed", "data"),
        Input({"type": f"{prefix}-graph", "place": ALL}, "relayoutData"),
        Input(f"{prefix}-goto", "data"),
        prevent_initial_call=True,
    )
