/* The axes of a Plotly graph by its public interface: the layout, which Plotly keeps up to date and in which the server has
   fixed all margins, and the size of the graph on the page. */
(function (recycle) {
  "use strict";
  const TICK_PIXELS = 80, FEWEST_TICKS = 5, MOST_TICKS = 10;

  /* Pixels of the graph and of its axes, and what these show; null while there are none. */
  recycle.axes = function (plot) {
    const { layout } = plot, { width, height } = plot.getBoundingClientRect();
    if (!layout || !layout.xaxis || !layout.xaxis.range || !width) return null;
    const { l, t, r, b } = layout.margin;
    return {
      graph: { width, height }, place: { left: l, top: t, width: width - l - r, height: height - t - b },
      x: layout.xaxis.range, y: layout.yaxis.range,
    };
  };

  /* Distance of round ticks on an axis: 1, 2 or 5 times a power of ten. */
  recycle.tickStep = function (length, pixels) {
    const most = Math.min(Math.max(pixels / TICK_PIXELS + 1, FEWEST_TICKS), MOST_TICKS), rough = length / most;
    const power = 10 ** Math.floor(Math.log10(rough));
    return Number((power * [1, 2, 5, 10].find((factor) => factor * power >= rough * (1 - 1e-9))).toPrecision(3));
  };
})(window.recycle = window.recycle || {});
