/* The axes of a Plotly graph by its public interface: the layout, which Plotly keeps up to date and in which the server has
   fixed all margins, and the size of the graph on the page. */
(function (recycle) {
  "use strict";
  const TICK_PIXELS = 80, FEWEST_TICKS = 4, MOST_TICKS = 9;

  /* Sizes as the observer last told them. Asking a graph itself makes the browser lay the page out on the spot, several times
     for each movement of the pointer. */
  const sizes = new WeakMap();
  const observer = new ResizeObserver((entries) => {
    for (const { target, borderBoxSize: [{ inlineSize, blockSize }] } of entries) sizes.set(target, { width: inlineSize, height: blockSize });
  });

  function sizeOf(plot) {
    if (!sizes.has(plot)) {
      sizes.set(plot, plot.getBoundingClientRect());
      observer.observe(plot);
    }
    return sizes.get(plot);
  }

  /* Pixels of the graph and of its axes, and what these show; null while there are none. */
  recycle.axes = function (plot) {
    const { layout } = plot, { width, height } = sizeOf(plot);
    if (!layout || !layout.xaxis || !layout.xaxis.range || !width) return null;
    const { l, t, r, b } = layout.margin;
    return {
      graph: { width, height }, place: { left: l, top: t, width: width - l - r, height: height - t - b },
      x: layout.xaxis.range, y: layout.yaxis.range,
    };
  };

  /* Distance of the ticks that Plotly puts on an axis by itself: 2, 5 or 10 times a power of ten. The canvas draws the grid
     that goes with them. */
  recycle.tickStep = function (length, pixels) {
    const rough = length / (Math.min(Math.max(pixels / TICK_PIXELS, FEWEST_TICKS), MOST_TICKS) + 1);
    const power = 10 ** Math.floor(Math.log(rough) / Math.LN10);
    return power * ([2, 5].find((factor) => factor >= rough / power) || 10);
  };
})(window.recycle = window.recycle || {});
