/* Strips under the lanes: memory of the selected worker, and differences of starts; and the memory of all workers in their
   lanes. The server sends memory once per table (viz/analysis/memory.py), on first use. */
import { element, sizeCanvas } from "viz/page.js";
import { bandRows } from "viz/raster.js";
import { fetchBytes } from "viz/table.js";
const HEIGHT = 96, TOP = 18, BOTTOM = 6, MAX_POINTS = 2000, POINT = 5;
const HEADER = 8, MIN_LANE = 6, MIN_TEXT = 15;

/* Draw one strip: text above, values from `low` to `high` at the left; `draw` gets x and y of times and values. */
function strip(view, picture, place, at, { words, low, high, values, show }, draw) {
  while (place.childElementCount <= at) place.append(element("canvas", { role: "img" }));
  const canvas = place.children[at], { ratio, theme, left, width } = picture;
  canvas.width = 0; // clears it
  sizeCanvas(canvas, view.canvas.width / ratio, HEIGHT, ratio);
  const context = canvas.getContext("2d"), top = TOP * ratio, tall = (HEIGHT - TOP - BOTTOM) * ratio, size = 12 * ratio;
  context.font = `${size}px ${theme.font}`;
  context.textBaseline = "middle";
  context.fillStyle = theme.lane;
  context.fillRect(left, top, width, tall);
  context.fillStyle = theme.ink;
  canvas.setAttribute("aria-label", words);
  context.fillText(words, left, top / 2);
  if (!draw) return;
  const x = (t) => left + (t - picture.view.t0) * picture.perTime, y = (value) => top + tall * (1 - (value - low) / (high - low));
  context.textAlign = "right";
  values.forEach((value, at) => { // one that an earlier value covers is left out
    if (values.slice(0, at).every((other) => Math.abs(y(value) - y(other)) >= size)) context.fillText(show(value), left - 8 * ratio, Math.min(y(value), top + tall - size / 2));
  });
  context.save();
  context.beginPath();
  context.rect(left, top, width, tall);
  context.clip();
  draw(context, x, y);
  context.restore();
}

/* Draw a horizontal line of dashes with gaps; without gaps it is whole. */
function line(context, x0, x1, y, colour, wide, [dash, gap] = [x1 - x0, 0]) {
  context.fillStyle = colour;
  for (let x = x0; x < x1; x += dash + gap) context.fillRect(x, y - wide / 2, Math.min(dash, x1 - x), wide);
}

const shown = (value) => String(+value.toPrecision(4));
const amount = (value, inBytes) => (inBytes ? `${+(value / (value < 1e9 ? 1e6 : 1e9)).toPrecision(3)} ${value < 1e9 ? "MB" : "GB"}` : shown(value));

/* {limits, from, after, inBytes} of a table: limits, and memory from the start and end of each operation. */
async function fetchHeld(table) {
  if (table.sources) {
    const all = await Promise.all(table.sources.map(fetchHeld));
    const limits = Float32Array.from({ length: table.lanes }, (_, lane) => all[lane % all.length].limits[Math.floor(lane / all.length)]);
    return { limits, from: table.gather(all.map((entry) => entry.from)), after: table.gather(all.map((entry) => entry.after)), inBytes: all[0].inBytes };
  }
  const buffer = await fetchBytes(table.address.replace("lanes/", "held/")), head = new DataView(buffer), lanes = head.getUint32(0, true);
  const column = (place, length) => new Float32Array(buffer, HEADER + 4 * place, length);
  return {
    limits: column(0, lanes), from: column(lanes, table.length), after: column(lanes + table.length, table.length), inBytes: head.getUint32(4, true) === 1,
  };
}

/* The same for the table of a view, with its maximum; null until it is loaded. */
function heldOf(view) {
  if (view.held?.table === view.table) return view.held.values;
  const request = { table: view.table, values: null, curve: null };
  view.held = request;
  fetchHeld(view.table).then((found) => {
    const most = [found.from, found.limits].map((all) => all.reduce((high, value) => (value > high ? value : high), 1e-9));
    request.values = { ...found, most: 1.05 * Math.max(...most) };
    view.redraw();
  }, () => { view.showsHeld = view.showsMemory = false; view.announce("The memory of these lanes is not known."); view.redraw(); });
  return null;
}

/* Memory of a lane over time: [time, amount], ascending, with its peak; null for an empty lane. */
function curveOf({ table, held }, lane) {
  if (held.curve?.lane === lane) return held.curve;
  const { from, after } = held.values, points = [], first = table.offsets[lane];
  let top = first;
  for (let i = first; i < table.offsets[lane + 1]; i++) {
    points.push([table.start[i], from[i]], [table.end[i], after[i]]);
    if (from[i] > from[top] * (1 + 1e-6)) top = i;
  }
  if (!points.length) return null;
  held.curve = { lane, points: points.sort((a, b) => a[0] - b[0]), peak: from[top], top };
  return held.curve;
}

/* What a lane holds at a time, in a line; nothing unless memory is shown and loaded. */
export function heldAt(view, lane, t) {
  const { table, held } = view, found = (view.showsHeld || view.showsMemory) && held?.table === table && held.values;
  if (!found || table.isFailed[lane]) return [];
  const i = table.beganBefore(lane, t) - 1, value = i < table.offsets[lane] ? 0 : table.end[i] > t ? found.from[i] : found.after[i], limit = found.limits[lane];
  return [`holds ${amount(value, found.inBytes)}${Number.isNaN(limit) ? "" : ` of ${amount(limit, found.inBytes)}`}${found.inBytes ? "" : " activations"}`];
}

export function drawMemory(view, picture) {
  const place = view.root.querySelector(".lanes-memory"), { table, lane } = view;
  place.hidden = !view.showsMemory;
  if (!view.showsMemory) return;
  const found = heldOf(view), curve = found && lane >= 0 && curveOf(view, lane);
  if (!curve) { strip(view, picture, place, 0, { words: "Memory: select an operation or a worker" }); return; }
  const { points, peak, top } = curve, limit = found.limits[lane], hasLimit = !Number.isNaN(limit), { theme, ratio, left, width } = picture;
  const heldText = `${found.inBytes ? "Memory" : "Activations"} held by ${table.labels[lane]}: most ${amount(peak, found.inBytes)}`;
  const words = `${heldText} at ${table.time(table.start[top])} by ${table.instruction(top)}${hasLimit ? `, limit ${amount(limit, found.inBytes)} (dashed)` : ""}`;
  const values = hasLimit ? [0, peak, limit] : [0, peak], high = 1.08 * Math.max(...values, found.inBytes ? 0 : 1);
  strip(view, picture, place, 0, { words, low: 0, high, values, show: (value) => amount(value, found.inBytes) }, (context, x, y) => {
    context.beginPath();
    context.moveTo(x(points[0][0]), y(0));
    points.forEach(([t, held], at) => {
      if (at) context.lineTo(x(t), y(points[at - 1][1]));
      context.lineTo(x(t), y(held));
    });
    context.lineTo(x(points.at(-1)[0]), y(0));
    context.fillStyle = theme.memory;
    context.fill();
    context.strokeStyle = theme.ink;
    context.lineWidth = ratio;
    context.stroke();
    if (hasLimit) line(context, left, left + width, y(limit), theme.failure.mark, 2 * ratio, [6 * ratio, 4 * ratio]);
    context.fillStyle = theme.ink;
    context.beginPath();
    context.arc(x(table.start[top]), y(peak), 4 * ratio, 0, 7);
    context.fill();
  });
}

/* A strip per compared table (viz/pages/comparison.py): points in the colours of the lanes, or least and most per column of
   pixels. */
export function drawDeltas(view, picture) {
  const place = view.root.querySelector(".lanes-deltas"), { theme, ratio, left, width } = picture;
  (view.table.compared || []).forEach((entry, at) => {
    const { table, deltas, name, low, high } = entry, { t0, t1 } = picture.view, room = 0.08 * (high - low) || 1, inView = [];
    for (let i = 0; i < table.length; i++) {
      if (table.start[i] >= t0 && table.start[i] <= t1 && table.isWork[table.kind[i]] && !Number.isNaN(deltas[i])) inView.push(i);
    }
    const [scale, unit] = table.unit, show = (value) => shown(value * scale);
    const axis = { words: `Later starts in ${name}: ${show(low)} to ${show(high)} ${unit}`.trim(), low: low - room, high: high + room, values: [low, 0, high], show };
    strip(view, picture, place, at, axis, (context, x, y) => {
      line(context, left, left + width, y(0), theme.muted, ratio);
      if (inView.length <= MAX_POINTS) {
        for (const i of inView) {
          context.fillStyle = table.paints[table.kinds[table.kind[i]].parts[0][0]].fill;
          context.fillRect(x(table.start[i]) - POINT * ratio / 2, y(deltas[i]) - POINT * ratio / 2, POINT * ratio, POINT * ratio);
        }
        return;
      }
      const least = new Float32Array(width).fill(Infinity), most = new Float32Array(width).fill(-Infinity);
      for (const i of inView) {
        const column = Math.min(width - 1, Math.floor(x(table.start[i]) - left));
        least[column] = Math.min(least[column], deltas[i]);
        most[column] = Math.max(most[column], deltas[i]);
      }
      context.fillStyle = theme.ink;
      most.forEach((value, column) => { if (value > -Infinity) context.fillRect(left + column, y(value) - ratio, 1, y(least[column]) - y(value) + 2 * ratio); });
    });
  });
}

/* Maximum memory in each pixel column of any lane of rows [row, end). */
function highest(picture, found, row, end) {
  const { table, rows, view, perTime, width } = picture, high = new Float32Array(width);
  const raise = (t0, t1, value) => {
    const first = Math.max(0, Math.floor((t0 - view.t0) * perTime)), last = Math.min(width, Math.ceil((t1 - view.t0) * perTime));
    for (let x = first; x < last; x++) if (value > high[x]) high[x] = value;
  };
  for (let place = rows.first[row]; place < rows.first[end]; place++) {
    const lane = rows.order[place], stop = table.offsets[lane + 1];
    const begin = Math.max(table.offsets[lane], table.firstAfter(lane, view.t0) - 1);
    for (let i = begin; i < stop && table.start[i] <= view.t1; i++) {
      raise(table.start[i], table.end[i], found.from[i]);
      raise(table.end[i], i + 1 < stop ? table.start[i + 1] : table.span, found.after[i]);
    }
  }
  return high;
}

const bandsOf = (picture) => (picture.perRow < MIN_LANE * picture.ratio
  ? bandRows(picture.rows, picture.perRow / picture.ratio) : Array.from({ length: picture.rows.count + 1 }, (_, row) => row));

/* Draw memory instead of work, with one scale for all lanes; false until it is loaded. */
export function drawHeld(picture, raster, view) {
  const found = heldOf(view);
  if (!found) return false;
  const { words } = picture.theme, bands = bandsOf(picture);
  for (let band = 0; band + 1 < bands.length; band++) {
    const y0 = picture.y(bands[band]), y1 = picture.y(bands[band + 1]);
    if (y1 <= 0 || y0 >= picture.height) continue;
    const high = highest(picture, found, bands[band], bands[band + 1]), tall = y1 - y0 - 1;
    for (let x = 0; x < picture.width; x++) {
      if (high[x] > 0) raster.fill(x, y1 - Math.max(1, Math.round((high[x] / found.most) * tall)), x + 1, y1, words.held);
    }
  }
  return true;
}

export function drawHeldMarks(picture, context, view) {
  const found = view.showsHeld && heldOf(view);
  if (!found || picture.perRow < MIN_LANE * picture.ratio) return;
  const { table, rows, row0, row1, perRow, ratio, theme, width } = picture, letters = Math.min(12 * ratio, perRow * 0.45);
  context.textAlign = "left";
  context.textBaseline = "top";
  context.font = `${letters}px ${theme.font}`;
  for (let row = row0; row < row1; row++) {
    const lanes = Array.from(rows.order.subarray(rows.first[row], rows.first[row + 1])).filter((one) => !table.isFailed[one]), [lane] = lanes;
    if (!lanes.length) continue;
    const bottom = (row + 1 - picture.view.y0) * perRow, limit = found.limits[lane], hasLimit = !Number.isNaN(limit);
    if (hasLimit) line(context, 0, width, bottom - (limit / found.most) * (perRow - 1), theme.failure.mark, 1.5 * ratio, [6 * ratio, 4 * ratio]);
    if (perRow < MIN_TEXT * ratio) continue;
    let peak = 0;
    for (const one of lanes) for (let i = table.offsets[one]; i < table.offsets[one + 1]; i++) if (found.from[i] > peak) peak = found.from[i];
    context.fillStyle = peak > limit * (1 + 1e-6) ? theme.failure.mark : theme.ink;
    const text = `${amount(peak, found.inBytes)}${hasLimit ? ` of ${amount(limit, found.inBytes)}` : ""}`;
    context.fillText(lanes.length > 1 ? `most of ${lanes.length}: ${text}` : text, 6 * ratio, bottom - perRow + Math.min(8 * ratio, 0.3 * perRow));
  }
}
