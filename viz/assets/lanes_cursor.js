/* One cursor for all graphs with one time axis: a line at the time under the pointer, on lanes and figures alike. */
(function (recycle) {
  "use strict";

  function line(plot) {
    let found = plot.querySelector(":scope > .lanes-cursor");
    if (!found) {
      found = document.createElement("div");
      found.className = "lanes-cursor";
      plot.append(found);
    }
    return found;
  }

  /* `t` in the unit of the axes of `plots`; null takes the line away. */
  function draw(plots, t) {
    for (const plot of plots) {
      const { xaxis, yaxis } = plot._fullLayout || {};
      if (!xaxis || (t === null && !plot.querySelector(":scope > .lanes-cursor"))) continue;
      const [low, high] = xaxis.range, share = t === null ? -1 : (t - low) / (high - low), { style } = line(plot);
      style.display = share >= 0 && share <= 1 ? "block" : "none";
      style.transform = `translateX(${Math.round(xaxis._offset + share * xaxis._length)}px)`;
      style.top = `${yaxis._offset}px`;
      style.height = `${yaxis._length}px`;
    }
  }

  const plotsOf = (name) => document.querySelectorAll(`[id="${name}-linked"] .js-plotly-plot, .lanes-view[data-linked="${name}"] .js-plotly-plot`);

  recycle.cursor = function (view, t) {
    if (view.linked) draw(plotsOf(view.linked), t === null ? null : t * view.scale);
  };

  /* Over a figure the pointer is followed here, over lanes by their view. */
  document.addEventListener("pointermove", (event) => {
    const plot = event.target.closest && event.target.closest(".linked .figure-view .js-plotly-plot");
    const block = plot && plot.closest(".linked"), { xaxis } = (plot && plot._fullLayout) || {};
    if (!xaxis) return;
    const share = (event.clientX - plot.getBoundingClientRect().left - xaxis._offset) / xaxis._length, [low, high] = xaxis.range;
    draw(block.querySelectorAll(".js-plotly-plot"), share >= 0 && share <= 1 ? low + share * (high - low) : null);
  }, { passive: true });
})(window.recycle = window.recycle || {});
