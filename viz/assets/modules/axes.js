/* The axes of timelines: sizes on the page, ticks, the box that a drag zooms into, and one cursor for all with one axis. */
import { element } from "viz/page.js";
const TICK_PIXELS = 80, FEWEST_TICKS = 4, MOST_TICKS = 9;

/* Sizes as the observer last told them. Asking an element itself makes the browser lay the page out on the spot, several
   times for each movement of the pointer. */
const sizes = new WeakMap();
const observer = new ResizeObserver((entries) => {
  for (const { target, borderBoxSize: [{ inlineSize, blockSize }] } of entries) sizes.set(target, { width: inlineSize, height: blockSize });
});

export function sizeOf(node) {
  if (!sizes.has(node)) {
    sizes.set(node, node.getBoundingClientRect());
    observer.observe(node);
  }
  return sizes.get(node);
}

/* Distance of ticks: 2, 5 or 10 times a power of ten. */
export function tickStep(length, pixels) {
  const rough = length / (Math.min(Math.max(pixels / TICK_PIXELS, FEWEST_TICKS), MOST_TICKS) + 1);
  const power = 10 ** Math.floor(Math.log(rough) / Math.LN10);
  return power * ([2, 5].find((factor) => factor >= rough / power) || 10);
}

/* As many decimals as the distance of the ticks has. */
const text = (value, step) => String(+value.toFixed(Math.max(0, Math.min(20, -Math.floor(Math.log10(step) + 1e-9)))));

/* A part of what lies over the lanes, made when it is first asked for. */
function over(view, className) {
  const found = view.overlay.querySelector(`:scope > .${className}`) || element("div", { className, ariaHidden: "true" });
  if (!found.isConnected) view.overlay.append(found);
  return found;
}

/* A span per tick of the timeline, the last one with the unit. */
export function drawTicks(view) {
  const { place, scale, view: { t0, t1 } } = view, { word } = view.root.dataset, step = view.tickStep, shown = view.ticks, axis = over(view, "ticks");
  while (axis.childElementCount > shown.length) axis.lastChild.remove();
  while (axis.childElementCount < shown.length) axis.append(element("span", { className: "tick" }));
  shown.forEach((t, at) => {
    const tick = axis.children[at], says = text(t * scale, step) + (word && at === shown.length - 1 ? ` ${word}` : "");
    if (tick.textContent !== says) tick.textContent = says;
    tick.style.left = `${place.left + ((t - t0) / (t1 - t0)) * place.width}px`;
    tick.style.top = `${place.top}px`;
  });
}

/* The box of a window, null takes it away. */
export function drawZoomBox(view, box) {
  const drawn = over(view, "lanes-box");
  if (!box) { drawn.remove(); return; }
  const { place, view: { t0, t1, y0, y1 } } = view, x = (t) => place.left + ((t - t0) / (t1 - t0)) * place.width;
  const y = (row) => place.top + Math.min(Math.max((row - y0) / (y1 - y0), 0), 1) * place.height;
  Object.assign(drawn.style, {
    left: `${x(box.t0)}px`, width: `${x(box.t1) - x(box.t0)}px`, top: `${y(box.y0)}px`, height: `${y(box.y1) - y(box.y0)}px`,
  });
}

/* A line at time `t` on a timeline and those linked with it; null takes it away. */
export function drawCursor(view, t) {
  for (const one of [view, ...view.linkedViews]) {
    const { place, view: { t0, t1 } } = one, share = t === null ? -1 : (t - t0) / (t1 - t0);
    Object.assign(over(one, "lanes-cursor").style, {
      display: share >= 0 && share <= 1 ? "block" : "none", transform: `translateX(${Math.round(place.left + share * place.width)}px)`,
      top: `${place.top}px`, height: `${place.height}px`,
    });
  }
}
