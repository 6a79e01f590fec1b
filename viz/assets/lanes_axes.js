/* What stands above the lanes: the ticks of the time axis, and the box that a drag zooms into. */
(function (recycle) {
  "use strict";

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
