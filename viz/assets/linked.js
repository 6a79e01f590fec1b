/* Graphs of one block with one time axis: what is zoomed in one is zoomed in all, figures and lanes alike. */
window.dash_clientside = window.dash_clientside || {};
(function (recycle) {
  "use strict";
  const WAIT = 250, NEAR = 1e-6;

  /* The time range that a change asks for: of a graph that was zoomed, or places to go to; null for another change. */
  function wanted(root, value) {
    if ("places" in value) return go(root, value);
    if ("xaxis.range[0]" in value) return [value["xaxis.range[0]"], value["xaxis.range[1]"]];
    return Array.isArray(value["xaxis.range"]) ? value["xaxis.range"] : null;
  }

  /* Selects the only place, or frames several. */
  function go(root, { graph, places }) {
    const holder = root.querySelector(`[data-place="${graph}"] .lanes-view`);
    const view = holder && recycle.views.get(holder.dataset.name);
    if (!view) return null;
    const found = places.map(([lane, from, to]) => ({ lane, from, to }));
    root.scrollIntoView({ block: "nearest", behavior: "smooth" });
    if (found.length === 1) select(view, found[0]);
    view.frame(found);
    return [view.wanted.t0 * view.scale, view.wanted.t1 * view.scale];
  }

  function select(view, { lane, from, to }) {
    const { table } = view, slack = 1e-5 * view.span;
    for (let i = table.offsets[lane]; i < table.offsets[lane + 1]; i++) {
      if (Math.abs(table.start[i] - from) <= slack && Math.abs(table.end[i] - to) <= slack) return view.select(i);
    }
    return view.selectGap(lane, from, to);
  }

  function show(graph, range) {
    const lanes = graph.closest(".lanes-view"), view = lanes && recycle.views.get(lanes.dataset.name), axes = recycle.axes(graph);
    if (view) { view.show({ t0: range[0] / view.scale, t1: range[1] / view.scale }); return; }
    const near = (a, b) => Math.abs(a - b) <= NEAR * Math.abs(range[1] - range[0]);
    if (lanes || (axes && near(axes.x[0], range[0]) && near(axes.x[1], range[1]))) return;
    window.Plotly.relayout(graph, { "xaxis.range[0]": range[0], "xaxis.range[1]": range[1] });
  }

  window.dash_clientside.recycle = Object.assign(window.dash_clientside.recycle || {}, {
    /* Called for every change of any graph; its output is the store `PREFIX-range`, which is told a moment later. */
    follow() {
      const { no_update, callback_context: context, set_props } = window.dash_clientside;
      const store = context.outputs_list.id, prefix = store.slice(0, -"-range".length);
      const root = document.getElementById(`${prefix}-linked`);
      const ours = (change) => !change.prop_id.includes("lanes-axes") || change.prop_id.includes(`"name":"${prefix}-`);
      const changes = context.triggered.filter((change) => change.value && ours(change));
      const change = changes.find(({ value }) => "places" in value) || changes[0];
      const range = root && change ? wanted(root, change.value) : null;
      if (!range) return no_update;
      root.querySelectorAll(".js-plotly-plot").forEach((graph) => show(graph, range));
      clearTimeout(root.waiting);
      root.waiting = setTimeout(() => set_props(store, { data: range }), WAIT);
      return no_update;
    },
  });
})(window.recycle = window.recycle || {});
