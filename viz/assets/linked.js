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
      const range = root && changes.length ? wanted(changes[0].value) : null;
      if (!range) return no_update;
      root.querySelectorAll(".js-plotly-plot").forEach((graph) => show(graph, range));
      clearTimeout(root.waiting);
      root.waiting = setTimeout(() => set_props(store, { data: range }), WAIT);
      return no_update;
    },
  });
})(window.recycle = window.recycle || {});
