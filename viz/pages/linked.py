"""Graphs with one time axis: what is zoomed in one is zoomed in all, in the browser and without the server.

Everything inside `linked` follows, figures and lanes alike. `goto` is a store that zooms all of them to a place and
selects it in one of them, or frames several; the store `range` says what is shown, a moment after the last change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from dash import ALL, Dash, Input, Output, dcc, html

_FOLLOW = """
function () {
  const prefix = %(prefix)s, nothing = window.dash_clientside.no_update;
  const root = document.getElementById(prefix + '-linked');
  const ours = change => !change.prop_id.includes('lanes-axes') || change.prop_id.includes('"name":"' + prefix + '-');
  const all = dash_clientside.callback_context.triggered.filter(change => change.value && ours(change));
  const triggered = all.find(change => 'places' in change.value) || all[0];
  if (!triggered || !root) { return nothing; }
  const value = triggered.value;
  let range = null;
  if ('places' in value) { range = go(value); }
  else if ('xaxis.range[0]' in value) { range = [value['xaxis.range[0]'], value['xaxis.range[1]']]; }
  else if (Array.isArray(value['xaxis.range'])) { range = value['xaxis.range']; }
  if (!range) { return nothing; }
  const near = (a, b) => Math.abs(a - b) <= 1e-6 * Math.abs(range[1] - range[0]);
  root.querySelectorAll('.js-plotly-plot').forEach(graph => {
    const lanes = graph.closest('.lanes-view'), now = graph.layout && graph.layout.xaxis && graph.layout.xaxis.range;
    const view = lanes && window.recycle.views.get(lanes.dataset.name);
    if (view) { view.show({t0: range[0] / view.scale, t1: range[1] / view.scale}); }
    else if (!lanes && (!now || !near(now[0], range[0]) || !near(now[1], range[1]))) {
      Plotly.relayout(graph, {'xaxis.range[0]': range[0], 'xaxis.range[1]': range[1]});
    }
  });
  clearTimeout(root.telling);
  root.telling = setTimeout(() => window.dash_clientside.set_props(prefix + '-range', {data: range}), 250);
  return nothing;

  function go({graph, places}) {
    const holder = root.querySelector('[data-place="' + graph + '"] .lanes-view');
    const view = holder && window.recycle.views.get(holder.dataset.name);
    if (!view) { return null; }
    const found = places.map(([lane, from, to]) => ({lane, from, to}));
    root.scrollIntoView({block: 'nearest', behavior: 'smooth'});
    if (found.length === 1) { select(view, found[0]); }
    view.frame(found);
    return [view.wanted.t0 * view.scale, view.wanted.t1 * view.scale];
  }

  function select(view, {lane, from, to}) {
    const {table} = view, slack = 1e-5 * view.span;
    for (let i = table.offsets[lane]; i < table.offsets[lane + 1]; i++) {
      if (Math.abs(table.start[i] - from) <= slack && Math.abs(table.end[i] - to) <= slack) { return view.select(i); }
    }
    return view.selectGap(lane, from, to);
  }
}
"""


class LaneInterval(NamedTuple):
    """A stretch of a lane of the drawn table, in the table's time."""

    lane: int
    start: float
    end: float


def linked(prefix: str, *children: Any) -> html.Div:
    """A block whose graphs, figures with identifiers from `graph_id`, share one time axis."""
    return html.Div([*children], id=f"{prefix}-linked", className="linked")


def graph_id(prefix: str, place: int) -> dict[str, Any]:
    """The identifier of the graph at that place."""
    return {"type": f"{prefix}-graph", "place": place}


def stores(prefix: str) -> list[Any]:
    """What the page must hold once, outside of what callbacks replace."""
    return [dcc.Store(id=f"{prefix}-goto"), dcc.Store(id=f"{prefix}-range")]


def goto(places: Sequence[LaneInterval], graph: int = 0) -> dict[str, Any]:
    """For the store: the places to go to, all in the graph at that place of the block."""
    return {"graph": graph, "places": [list(place) for place in places]}


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
