"""Graphs with one time axis: what is zoomed in one is zoomed in all, in the browser and without the server.

Everything inside `linked` follows, figures and canvases of lanes alike. `goto` is a store that zooms all of them to a
place and frames or selects it in one of them; the store `range` says what is shown after each change.
"""

from __future__ import annotations

from typing import Any

from dash import ALL, Dash, Input, Output, dcc, html

_FOLLOW = """
function () {
  const prefix = %(prefix)s, nothing = window.dash_clientside.no_update;
  const root = document.getElementById(prefix + '-linked');
  const ours = change => !change.prop_id.includes('lanes-axes') || change.prop_id.includes('"name":"' + prefix + '-');
  const all = dash_clientside.callback_context.triggered.filter(change => change.value && ours(change));
  const triggered = all.find(change => 'begin' in change.value) || all[0];
  if (!triggered || !root) { return nothing; }
  const value = triggered.value, goes = 'begin' in value;
  let range = null;
  if (goes) { range = [value.begin, value.end]; }
  else if ('xaxis.range[0]' in value) { range = [value['xaxis.range[0]'], value['xaxis.range[1]']]; }
  else if (Array.isArray(value['xaxis.range'])) { range = value['xaxis.range']; }
  if (!range) { return nothing; }
  const near = (a, b) => Math.abs(a - b) <= 1e-6 * Math.abs(range[1] - range[0]);
  root.querySelectorAll('.js-plotly-plot').forEach(graph => {
    const lanes = graph.closest('.lanes-view'), now = graph.layout && graph.layout.xaxis && graph.layout.xaxis.range;
    const view = lanes && window.recycle ? window.recycle.views.get(lanes.dataset.name) : null;
    const holder = graph.closest('[data-place]');
    const isPlace = goes && value.lane !== null && holder !== null && Number(holder.dataset.place) === value.graph;
    if (view) {
      if (isPlace) { select(view, value); }
      view.show({t0: range[0] / view.scale, t1: range[1] / view.scale});
      return;
    }
    const change = {};
    if (!now || !near(now[0], range[0]) || !near(now[1], range[1])) {
      change['xaxis.range[0]'] = range[0];
      change['xaxis.range[1]'] = range[1];
    }
    if (goes) {
      const others = (graph.layout.shapes || []).filter(shape => shape.name !== 'place');
      const frame = isPlace ? [{
        name: 'place', type: 'rect', x0: value.from, x1: value.to, y0: value.lane - 0.47, y1: value.lane + 0.47,
        line: {color: '#D55E00', width: 3}, layer: 'above'
      }] : [];
      change.shapes = others.concat(frame);
    }
    if (Object.keys(change).length) { Plotly.relayout(graph, change); }
  });
  if (goes) { root.scrollIntoView({block: 'nearest', behavior: 'smooth'}); }
  return range;

  function select(view, value) {
    const {table} = view, from = value.from / view.scale, to = value.to / view.scale, slack = 1e-5 * view.span;
    for (let i = table.offsets[value.worker]; i < table.offsets[value.worker + 1]; i++) {
      if (Math.abs(table.start[i] - from) <= slack && Math.abs(table.end[i] - to) <= slack) {
        view.select(i);
        return;
      }
    }
    view.selectGap(value.worker, from, to);
  }
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
    return [dcc.Store(id=f"{prefix}-goto"), dcc.Store(id=f"{prefix}-range")]


def goto(
    begin: float, end: float, span: float, *, lane: int | None, worker: int, graph: int = 0, scale: float = 1.0
) -> dict[str, Any]:
    """A place for the store: [begin, end] with room around it, on an axis of length `span`.

    Args:
        lane: its place among the lanes of the graph, None when they do not hold it.
        worker: index of the worker, by which a canvas finds it in whatever order its lanes are.
        graph: place of the graph that holds it.
        scale: of the axis, see `time_unit`.
    """
    room = max(end - begin, 0.04 * span)
    low, high = begin - 2 * room, end + 2 * room
    return {
        "begin": scale * max(low, -0.004 * span),
        "end": scale * min(high, 1.004 * span),
        "from": scale * begin,
        "to": scale * end,
        "lane": lane,
        "worker": worker,
        "graph": graph,
    }


def register(app: Dash, prefix: str) -> None:
    """Add the callback that makes the graphs follow each other and the store."""
    in_browser: Any = app.clientside_callback
    in_browser(
        _FOLLOW % {"prefix": f"'{prefix}'"},
        Output(f"{prefix}-range", "data"),
        Input({"type": f"{prefix}-graph", "place": ALL}, "relayoutData"),
        Input({"type": "lanes-axes", "name": ALL}, "relayoutData"),
        Input(f"{prefix}-goto", "data"),
        prevent_initial_call=True,
    )
