/* The minimap: utilisation over the whole time, and the visible window, which a press or drag moves. */
import { element, followDrag, sizeCanvas } from "viz/page.js";
import { Raster, Shares } from "viz/raster.js";
import { Rows } from "viz/rows.js";
const HEIGHT = 24;

/* All lanes as one band, cached by width and theme. */
function overview(view, picture) {
  const { table, theme } = picture, { width } = picture, high = HEIGHT * picture.ratio, held = view.overview;
  if (held && held.width === width && held.theme === theme && held.table === table) return held;
  const raster = new Raster(width, high), rows = new Rows(table, "pipeline", new Set());
  raster.words.fill(theme.words.lane);
  const shares = new Shares(table, width), from = -view.margin, long = view.span + 2 * view.margin;
  const columnShares = shares.of(rows, 0, rows.count, from, width / long), colours = table.busy.map((paint) => theme.paints[paint].fill);
  for (let x = 0; x < width; x++) raster.stack(x, 0, high, columnShares, colours, shares.stride, x);
  view.overview = { width, theme, table, image: raster.image };
  return view.overview;
}

export function drawMinimap(view, picture) {
  const place = view.root.querySelector(".lanes-minimap");
  if (!place || place.hidden) return;
  const { ratio, theme, left, width } = picture, high = HEIGHT * ratio;
  if (!place.firstChild) attach(view, place);
  const canvas = place.firstChild, wide = view.canvas.width;
  sizeCanvas(canvas, wide / ratio, HEIGHT, ratio);
  const context = canvas.getContext("2d"), { t0, t1, y0, y1 } = view.view, long = view.span + 2 * view.margin;
  context.clearRect(0, 0, wide, high);
  context.putImageData(overview(view, picture).image, left, 0);
  const x = (t) => left + ((t + view.margin) / long) * width, y = (row) => (row / view.rows.count) * high;
  const box = [x(t0), y(y0), Math.max(3 * ratio, x(t1) - x(t0)), Math.max(3 * ratio, y(y1) - y(y0))];
  context.globalAlpha = 0.6;
  context.fillStyle = theme.paper;
  for (const [x0, y0_, w, h] of [[left, 0, box[0] - left, high], [box[0] + box[2], 0, left + width - box[0] - box[2], high],
    [box[0], 0, box[2], box[1]], [box[0], box[1] + box[3], box[2], high - box[1] - box[3]]]) if (w > 0 && h > 0) context.fillRect(x0, y0_, w, h);
  context.globalAlpha = 1;
  context.strokeStyle = theme.ink;
  context.lineWidth = 1.5 * ratio;
  context.strokeRect(box[0], box[1] + ratio, box[2], Math.max(ratio, box[3] - 2 * ratio));
}

function attach(view, place) {
  place.append(element("canvas", { ariaHidden: "true" }));
  place.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    const at = (pointer) => {
      const { left, top } = place.getBoundingClientRect(), { place: axes } = view;
      const share = (pointer.clientX - left - axes.left) / axes.width, down = (pointer.clientY - top) / HEIGHT;
      return [share * (view.span + 2 * view.margin) - view.margin, down * view.rows.count];
    };
    const { t0, t1, y0, y1 } = view.view, [t, row] = at(event);
    const holds = t >= t0 && t <= t1, off = holds ? [(t0 + t1) / 2 - t, (y0 + y1) / 2 - row] : [0, 0];
    const move = (pointer) => {
      const [now, under] = at(pointer), middle = now + off[0], centre = under + off[1];
      view.show({ t0: middle - (t1 - t0) / 2, t1: middle + (t1 - t0) / 2, y0: centre - (y1 - y0) / 2, y1: centre + (y1 - y0) / 2 });
    };
    move(event);
    followDrag(move);
  });
}
