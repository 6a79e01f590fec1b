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

  /* One cursor for all graphs with one time axis: a line at the time under the pointer, on lanes and figures alike. */

  function line(plot) {
    if (!plot.querySelector(":scope > .lanes-cursor")) plot.append(recycle.element("div", { className: "lanes-cursor" }));
    return plot.querySelector(":scope > .lanes-cursor");
  }

  /* `t` in the unit of the axes of `plots`; null takes the line away. */
  function draw(plots, t) {
    for (const plot of plots) {
      const axes = recycle.axes(plot);
      if (!axes || (t === null && !plot.querySelector(":scope > .lanes-cursor"))) continue;
      const { place } = axes, [low, high] = axes.x, share = t === null ? -1 : (t - low) / (high - low), { style } = line(plot);
      style.display = share >= 0 && share <= 1 ? "block" : "none";
      style.transform = `translateX(${Math.round(place.left + share * place.width)}px)`;
      style.top = `${place.top}px`;
      style.height = `${place.height}px`;
    }
  }

  const plotsOf = (name) => document.querySelectorAll(`[id="${name}-linked"] .js-plotly-plot, .lanes-view[data-linked="${name}"] .lanes-axes`);

  recycle.cursor = function (view, t) {
    if (view.linked) draw(plotsOf(view.linked), t === null ? null : t * view.scale);
  };

  /* Over a figure the pointer is followed here, over lanes by their view. */
  document.addEventListener("pointermove", (event) => {
    const plot = event.target.closest && event.target.closest(".linked .figure-view .js-plotly-plot");
    const axes = plot && recycle.axes(plot);
    if (!axes) return;
    const { left, width } = axes.place, [low, high] = axes.x;
    const share = (event.clientX - plot.getBoundingClientRect().left - left) / width;
    draw(plot.closest(".linked").querySelectorAll(".js-plotly-plot, .lanes-axes"), share >= 0 && share <= 1 ? low + share * (high - low) : null);
  }, { passive: true });
})(window.recycle = window.recycle || {});
