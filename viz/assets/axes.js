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
})(window.recycle = window.recycle || {});
