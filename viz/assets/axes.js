/* The axes of a graph: of lanes their own, of a Plotly figure by its public interface, the layout, which Plotly keeps up to
   date and in which the server has fixed all margins; and the size of a graph on the page. */
(function (recycle) {
  "use strict";
  const TICK_PIXELS = 80, FEWEST_TICKS = 4, MOST_TICKS = 9;

  /* Sizes as the observer last told them. Asking a graph itself makes the browser lay the page out on the spot, several times
     for each movement of the pointer. */
  const sizes = new WeakMap();
  const observer = new ResizeObserver((entries) => {
    for (const { target, borderBoxSize: [{ inlineSize, blockSize }] } of entries) sizes.set(target, { width: inlineSize, height: blockSize });
  });

  recycle.sizeOf = function (plot) {
    if (!sizes.has(plot)) {
      sizes.set(plot, plot.getBoundingClientRect());
      observer.observe(plot);
    }
    return sizes.get(plot);
  };

  /* Pixels of the graph and of its axes, and what these show; null while there are none. */
  recycle.axes = function (plot) {
    if (plot.lanes) return plot.lanes.axes;
    const { layout } = plot, { width, height } = recycle.sizeOf(plot);
    if (!layout || !layout.xaxis || !layout.xaxis.range || !width) return null;
    const { l, t, r, b } = layout.margin;
    return {
      graph: { width, height }, place: { left: l, top: t, width: width - l - r, height: height - t - b },
      x: layout.xaxis.range, y: layout.yaxis.range,
    };
  };

  /* Distance of ticks: 2, 5 or 10 times a power of ten, as Plotly puts them on the axes of figures. */
  recycle.tickStep = function (length, pixels) {
    const rough = length / (Math.min(Math.max(pixels / TICK_PIXELS, FEWEST_TICKS), MOST_TICKS) + 1);
    const power = 10 ** Math.floor(Math.log(rough) / Math.LN10);
    return power * ([2, 5].find((factor) => factor >= rough / power) || 10);
  };

  /* What stands above the lanes: the ticks of the time axis, and the box that a drag zooms into. */

  /* As many decimals as the distance of the ticks has. */
  const text = (value, step) => String(+value.toFixed(Math.max(0, Math.min(20, -Math.floor(Math.log10(step) + 1e-9)))));

  /* A span per tick of the timeline, the last one with the unit. */
  recycle.ticks = function (view) {
    const { overlay, place, scale, view: { t0, t1 } } = view, { word } = view.root.dataset, step = view.tickStep, shown = view.ticks;
    let axis = overlay.querySelector(":scope > .ticks");
    if (!axis) overlay.append(axis = recycle.element("div", { className: "ticks", ariaHidden: "true" }));
    while (axis.childElementCount > shown.length) axis.lastChild.remove();
    while (axis.childElementCount < shown.length) axis.append(recycle.element("span", { className: "tick" }));
    shown.forEach((t, at) => {
      const tick = axis.children[at], says = text(t * scale, step) + (word && at === shown.length - 1 ? ` ${word}` : "");
      if (tick.textContent !== says) tick.textContent = says;
      tick.style.left = `${place.left + ((t - t0) / (t1 - t0)) * place.width}px`;
      tick.style.top = `${place.top}px`;
    });
  };

  /* The box of a window, null takes it away. */
  recycle.zoomBox = function (view, box) {
    let drawn = view.overlay.querySelector(":scope > .lanes-box");
    if (!box) { drawn?.remove(); return; }
    if (!drawn) view.overlay.append(drawn = recycle.element("div", { className: "lanes-box" }));
    const { place, view: { t0, t1, y0, y1 } } = view, x = (t) => place.left + ((t - t0) / (t1 - t0)) * place.width;
    const y = (row) => place.top + Math.min(Math.max((row - y0) / (y1 - y0), 0), 1) * place.height;
    Object.assign(drawn.style, {
      left: `${x(box.t0)}px`, width: `${x(box.t1) - x(box.t0)}px`, top: `${y(box.y0)}px`, height: `${y(box.y1) - y(box.y0)}px`,
    });
  };
})(window.recycle = window.recycle || {});
