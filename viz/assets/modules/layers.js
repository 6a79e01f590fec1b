/* Layers over the lanes: outlines of the previous plan (`data-ghost`), places of findings, the deadlock, and others. */
import { drawTag, outline } from "viz/draw.js";
import { drawFlow, drawRange } from "viz/flow.js";
import { drawNotes } from "viz/notes.js";
const MAX_OUTLINES = 8000, MIN_LANE = 6;

/* Whether the lane still has an operation of the old table at the same time. */
function stayed(table, old, i, lane, near) {
  for (let k = table.beganBefore(lane, old.start[i] - near); k < table.offsets[lane + 1] && table.start[k] <= old.start[i] + near; k++) {
    if (table.kinds[table.kind[k]].token === old.kinds[old.kind[i]].token && table.home(k) === old.home(i) && table.stage[k] === old.stage[i]) return true;
  }
  return false;
}

/* Visible operations of the old table that have moved; null if there are too many outlines. */
function inView(picture, old) {
  const { rows, view, table } = picture, outlined = [], near = 1e-6 * old.span;
  if (picture.perRow < MIN_LANE * picture.ratio) return null;
  for (let row = picture.row0; row < picture.row1; row++) {
    const lane = rows.lane(row);
    if (lane < 0 || lane >= old.lanes) continue;
    const end = old.beganBefore(lane, view.t1);
    for (let i = old.firstAfter(lane, view.t0); i < end; i++) {
      if (old.isWork[old.kind[i]] && old.end[i] > old.start[i] && !stayed(table, old, i, lane, near)) outlined.push([i, row]);
    }
    if (outlined.length > MAX_OUTLINES) return null;
  }
  return outlined;
}

function ghost(picture, context, { ghost: old, theme }) {
  const outlined = old && inView(picture, old);
  if (!outlined) return;
  const { view, perTime, perRow, ratio } = picture;
  context.beginPath();
  for (const [i, row] of outlined) {
    const x0 = (old.start[i] - view.t0) * perTime, x1 = (old.end[i] - view.t0) * perTime, y = (row - view.y0) * perRow;
    context.rect(x0 + ratio, y + 0.05 * perRow, Math.max(1, x1 - x0 - 2 * ratio), 0.86 * perRow);
  }
  context.strokeStyle = theme.ink;
  context.globalAlpha = 0.6;
  context.lineWidth = 1.2 * ratio;
  context.setLineDash([2 * ratio, 2.5 * ratio]);
  context.stroke();
  context.setLineDash([]);
  context.globalAlpha = 1;
  picture.failedLabels(context); // outlines may cross them
}

/* Numbered frames around places, joined by lines. */
function places(picture, context, { places: all, theme }) {
  if (!all || !all.length) return;
  const { perRow, ratio, width, height } = picture, boxes = all.map((place) => picture.placeBox(place));
  /* Next to the labels: between facing edges, or over the top of one lane. */
  const join = ([x0, y0, wide0, high0], [x1, y1, wide1, high1]) => {
    const from = x0 + wide0 / 2, to = x1 + wide1 / 2, lift = Math.max(3 * ratio, y0 - 0.55 * perRow);
    if (Math.abs(y0 - y1) < 1) return `M${from} ${y0}C${from} ${lift} ${to} ${lift} ${to} ${y1}`;
    return `M${from} ${y0 < y1 ? y0 + high0 : y0}L${to} ${y0 < y1 ? y1 : y1 + high1}`;
  };
  const frames = new Path2D(), mark = theme.failure.mark;
  for (const box of boxes) frames.rect(...box);
  const next = (place) => boxes[(place + 1) % boxes.length], joined = boxes.slice(boxes.length < 3 ? 1 : 0); // two are joined once
  joined.forEach((box) => outline(context, new Path2D(join(box, next(boxes.indexOf(box)))), mark, 2.5, picture, [7, 4]));
  outline(context, frames, mark, 2.5, picture);
  if (boxes.length < 2) return;
  context.font = `700 ${11 * ratio}px ${theme.font}`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  boxes.forEach(([x, y], place) => {
    const r = 8 * ratio, at = [Math.min(Math.max(x, r), width - r), Math.min(Math.max(y, r), height - r)];
    if (x < -r || x > width + r || y < -2 * r || y > height + r) return;
    context.fillStyle = theme.failure.mark;
    context.beginPath();
    context.arc(...at, r, 0, 7);
    context.fill();
    context.fillStyle = theme.failure.ink;
    context.fillText(String(place + 1), at[0], at[1] + ratio);
  });
}

/* Ribbons from work to the lane of the failed worker whose work it is, for a row of the panel (viz/pages/panels.py). */
function ribbons(picture, context, { ribbons: chosen, table, theme }) {
  if (!chosen) return;
  const [{ home }, [[lane]]] = [chosen, JSON.parse(chosen.places)], [, top, , high] = picture.placeBox({ lane: home, from: 0, to: 0 });
  context.globalAlpha = 0.5;
  context.fillStyle = theme.failure.mark;
  for (const i of table.operations(lane)) {
    if (!table.has(i, "REROUTED") || !table.isWork[table.kind[i]] || table.pipeline[i] !== table.pipelines[home]) continue;
    const [x, y, wide, tall] = picture.box(i), [from, to] = y > top ? [top + high / 2, y] : [y + tall, top + high / 2];
    context.fillRect(x, from, wide, to - from);
  }
  context.globalAlpha = 1;
}

/* The time of a deadlock; later operations never run and are pale. */
function halt(picture, context, { table, theme }) {
  if (typeof table.halt !== "number") return;
  const { view, perTime, ratio, width, height } = picture, x = (table.halt - view.t0) * perTime;
  if (x >= width) return;
  context.globalAlpha = 0.55;
  context.fillStyle = theme.paper;
  context.fillRect(Math.max(0, x), 0, width, height);
  context.globalAlpha = 1;
  context.fillStyle = theme.failure.mark;
  if (x >= 0) context.fillRect(x - ratio, 0, 2 * ratio, height);
}

/* Its name, above the frames of findings. */
function haltTag({ view, perTime, ratio, width, height }, context, { table, theme }) {
  const x = (table.halt - view.t0) * perTime, size = 12 * ratio, left = (wide) => Math.min(x, width - wide);
  if (typeof table.halt === "number" && x >= 0 && x < width) drawTag(context, "deadlock", theme.failure.mark, theme.failure.ink, { size, font: theme.font, left, top: height - 1.5 * size });
}

export const drawLayers = (picture, context, view) => picture.clipped(context, () => {
  for (const layer of [halt, ghost, places, haltTag, ribbons, drawFlow, drawRange, drawNotes]) layer(picture, context, view);
});
