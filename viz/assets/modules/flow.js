/* A micro-batch on all workers, joined in order over paled other work; and a marked range of time. */
import { drawTag, outline } from "viz/draw.js";
import { followDrag } from "viz/page.js";

/* Operations of the selection's micro-batch, by start; [] without one. */
export function flowOf(table, operation) {
  if (operation < 0 || !table.kinds[table.kind[operation]].homed) return [];
  const home = table.home(operation), operations = [];
  for (let i = 0; i < table.length; i++) {
    if (table.micro_batch[i] === table.micro_batch[operation] && table.isWork[table.kind[i]] && table.home(i) === home) operations.push(i);
  }
  return operations.sort((a, b) => table.start[a] - table.start[b] || table.stage[a] - table.stage[b]);
}

export function drawFlow(picture, context, view) {
  const { theme, width, height, ratio, table } = picture;
  if (!view.flow || !view.flow.length) return;
  context.globalAlpha = 0.72;
  context.fillStyle = theme.paper;
  context.fillRect(0, 0, width, height);
  context.globalAlpha = 1;
  const line = new Path2D();
  for (const operation of view.flow) {
    const [x, y, wide, high] = picture.box(operation), { parts, token } = table.kinds[table.kind[operation]];
    const chunk = Math.floor(table.stage[operation] / table.stages_per_chunk), paints = table.chunk_paints?.[chunk] || table.paints;
    for (const [paint, first, last] of parts) {
      context.fillStyle = paints[paint].fill;
      context.fillRect(x + first * wide, y, Math.max(1, (last - first) * wide), high);
    }
    context.strokeStyle = theme.ink;
    context.lineWidth = ratio;
    context.strokeRect(x, y, wide, high);
    if (token !== "W") line.lineTo(x + wide / 2, y + high / 2); // nothing waits for a W
  }
  if (!view.flow.isLoose) outline(context, line, theme.ink, 1.6, picture);
}

export function drawRange(picture, context, { range: marked, theme, table }) {
  if (!marked) return;
  const { view, perTime, ratio, height } = picture, x0 = (marked.t0 - view.t0) * perTime, x1 = (marked.t1 - view.t0) * perTime;
  context.globalAlpha = 0.12;
  context.fillStyle = theme.ink;
  context.fillRect(x0, 0, x1 - x0, height);
  context.globalAlpha = 1;
  for (const x of [x0, x1]) context.fillRect(x - ratio / 2, 0, ratio, height);
  const left = (wide) => (x0 + x1 - wide) / 2, size = 12 * ratio;
  drawTag(context, table.time(marked.t1 - marked.t0), theme.paper, theme.ink, { size, font: theme.font, left, top: 2 * ratio });
}

/* A drag along the axis above the lanes marks a range; a click removes it. */
export function markRange(view, event) {
  const { t } = view.under(event), cut = (time) => Math.min(Math.max(time, 0), view.span);
  const mark = (move) => {
    const to = view.under(move).t, [t0, t1] = [cut(Math.min(t, to)), cut(Math.max(t, to))];
    view.setRange(t1 - t0 > view.span * 1e-6 ? { t0, t1 } : null, true);
  };
  followDrag(mark, (last) => { mark(last); view.setRange(view.range); });
}
