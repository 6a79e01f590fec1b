/* Axes of timelines: ticks, the zoom box, and a cursor shared by linked timelines. */
import { element } from "viz/page.js";
const TICK_PIXELS = 80, FEWEST_TICKS = 4, MAX_TICKS = 9;

/* Distance of ticks: 2, 5 or 10 times a power of ten. */
export function tickStep(length, pixels) {
  const rough = length / (Math.min(Math.max(pixels / TICK_PIXELS, FEWEST_TICKS), MAX_TICKS) + 1);
  const power = 10 ** Math.floor(Math.log(rough) / Math.LN10);
  return power * ([2, 5].find((factor) => factor >= rough / power) || 10);
}

const text = (value, step) => String(+value.toFixed(Math.max(0, Math.min(20, -Math.floor(Math.log10(step) + 1e-9)))));

/* An element over the lanes, created on first use. */
function over(view, className) {
  const part = view.overlay.querySelector(`:scope > .${className}`) || element("div", { className, ariaHidden: "true" });
  if (!part.isConnected) view.overlay.append(part);
  return part;
}

export function drawTicks(view) {
  const { place, scale, view: { t0, t1 } } = view, { word } = view.root.dataset, step = view.tickStep, shown = view.ticks, axis = over(view, "ticks");
  while (axis.childElementCount > shown.length) axis.lastChild.remove();
  while (axis.childElementCount < shown.length) axis.append(element("span", { className: "tick" }));
  shown.forEach((t, at) => {
    const tick = axis.children[at], label = text(t * scale, step) + (at ? "" : ` ${word || "units"}`);
    if (tick.textContent !== label) tick.textContent = label;
    tick.style.left = `${place.left + ((t - t0) / (t1 - t0)) * place.width}px`;
    tick.style.top = `${place.top}px`;
  });
}

/* Draw the box of a window; null removes it. */
export function drawZoomBox(view, box) {
  const drawn = over(view, "lanes-box");
  if (!box) { drawn.remove(); return; }
  const { place, view: { t0, t1, y0, y1 } } = view, x = (t) => place.left + ((t - t0) / (t1 - t0)) * place.width;
  const y = (row) => place.top + Math.min(Math.max((row - y0) / (y1 - y0), 0), 1) * place.height;
  Object.assign(drawn.style, {
    left: `${x(box.t0)}px`, width: `${x(box.t1) - x(box.t0)}px`, top: `${y(box.y0)}px`, height: `${y(box.y1) - y(box.y0)}px`,
  });
}

/* Draw a line at time `t` on a timeline and those linked with it; null removes it. */
export function drawCursor(view, t) {
  for (const linked of [view, ...view.linkedViews]) {
    const { place, view: { t0, t1 } } = linked, share = t === null ? -1 : (t - t0) / (t1 - t0);
    Object.assign(over(linked, "lanes-cursor").style, {
      display: share >= 0 && share <= 1 ? "block" : "none", transform: `translateX(${Math.round(place.left + share * place.width)}px)`,
      top: `${place.top}px`, height: `${place.height}px`,
    });
  }
}
