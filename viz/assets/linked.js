/* Graphs of one block with one time axis: what is zoomed in one is zoomed in all, figures and lanes alike. */
window.dash_clientside = window.dash_clientside || {};
(function (recycle) {
  "use strict";
  const WAIT = 250, NEAR = 1e-6;

  /* The time range that a change asks for: of a graph that was zoomed; null for another change. */
  function wanted(value) {
    if ("xaxis.range[0]" in value) return [value["xaxis.range[0]"], value["xaxis.range[1]"]];
    return Array.isArray(value["xaxis.range"]) ? value["xaxis.range"] : null;
  }

  const near = ([a, b], [c, d]) => Math.max(Math.abs(a - c), Math.abs(b - d)) <= NEAR * Math.abs(d - c);

  function show(graph, range) {
    const axes = recycle.axes(graph);
    if (axes && near(axes.x, range)) return;
    window.Plotly.relayout(graph, { "xaxis.range[0]": range[0], "xaxis.range[1]": range[1] });
  }

  const figures = (prefix) => document.getElementById(`${prefix}-linked`)?.querySelectorAll(".js-plotly-plot") || [];

  /* Figures go to where a timeline of their block is, once per frame. */
  recycle.followFigures = (view) => {
    if (view.follows || !figures(view.linked).length) return;
    view.follows = true;
    requestAnimationFrame(() => {
      view.follows = false;
      if (view.root.isConnected) figures(view.linked).forEach((graph) => show(graph, view.axes.x));
    });
  };

  window.dash_clientside.recycle = Object.assign(window.dash_clientside.recycle || {}, {
    /* Called for every change of a figure; its output is the store `PREFIX-range`, which is told a moment later. */
    follow() {
      const { no_update, callback_context: context, set_props } = window.dash_clientside;
      const store = context.outputs_list.id, prefix = store.slice(0, -"-range".length);
      const root = document.getElementById(`${prefix}-linked`);
      const changes = context.triggered.filter((change) => change.value), range = root && changes.length ? wanted(changes[0].value) : null;
      if (!range) return no_update;
      figures(prefix).forEach((graph) => show(graph, range));
      for (const view of recycle.views.values()) {
        if (view.linked === prefix && !near(view.axes.x, range)) view.show({ t0: range[0] / view.scale, t1: range[1] / view.scale });
      }
      clearTimeout(root.waiting);
      root.waiting = setTimeout(() => set_props(store, { data: range }), WAIT);
      return no_update;
    },
  });
})(window.recycle = window.recycle || {});
