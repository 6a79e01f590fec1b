/* One cursor for all graphs with one time axis: a line at the time under the pointer, on lanes and figures alike. */
(function (recycle) {
  "use strict";

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
