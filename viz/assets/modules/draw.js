/* Draws the visible part of a table at its level of detail (bands of utilisation, rectangles, rectangles with labels) and
   the arrows of the selection, in canvas pixels. */
import { Shares, bandRows } from "viz/raster.js";
import { drawHeld, drawHeldMarks } from "viz/strips.js";
const MIN_OPERATION = 3, MIN_LANE = 3, LABEL_LANE = 16, LABEL_OPERATION = 12, UPRIGHT = 9, UPRIGHT_LANE = 34, MIN_TEXT = 8, MAX_LABELS = 4000, SMALLEST = 0.6, SMALL = 0.8;

/* `view` is {t0, t1, y0, y1} in time and rows, `plot` the place of the axes. */
export class Picture {
  constructor(table, rows, view, plot, ratio, theme) {
    Object.assign(this, { table, rows, view, ratio, theme });
    this.left = Math.round(plot.left * ratio);
    this.top = Math.round(plot.top * ratio);
    this.width = Math.round(plot.width * ratio);
    this.height = Math.round(plot.height * ratio);
    this.perTime = this.width / (view.t1 - view.t0);
    this.perRow = this.height / (view.y1 - view.y0);
    this.row0 = Math.max(0, Math.floor(view.y0));
    this.row1 = Math.min(rows.count, Math.ceil(view.y1));
  }

  x(t) { return Math.round((t - this.view.t0) * this.perTime); }
  y(row) { return Math.round((row - this.view.y0) * this.perRow); }

  /* 0: bands, 1: rectangles, 2: with labels. Bands if a lane or the mean visible operation is too thin. */
  get level() {
    if (this.perRow < MIN_LANE * this.ratio) return 0;
    let operations = 0, lanes = 0;
    for (let row = this.row0; row < this.row1; row++) {
      const lane = this.rows.lane(row);
      if (lane < 0 || this.table.isFailed[lane]) continue;
      lanes++;
      operations += this.table.beganBefore(lane, this.view.t1) - this.table.firstAfter(lane, this.view.t0);
    }
    if (operations * MIN_OPERATION * this.ratio > lanes * this.width) return 0;
    return this.perRow >= LABEL_LANE * this.ratio ? 2 : 1;
  }

  draw(context, raster, marks) {
    const level = this._fill(raster, marks);
    context.clearRect(0, 0, context.canvas.width, context.canvas.height);
    context.putImageData(raster.image, this.left, this.top);
    this.clipped(context, () => {
      if (level === 2 && !marks.showsHeld) this._labels(context);
      drawHeldMarks(this, context, marks);
      this.failedLabels(context);
      if (marks.matches) for (const operation of marks.matches) this._outline(context, this.box(operation), this.theme.ink, 2, [3, 2]);
      if (marks.path) this._path(context);
      if (marks.links && level > 0) this._links(context, marks.links, marks.selected);
      if (marks.gap) this._outline(context, this.placeBox(marks.gap), this.theme.ink, 2, [5, 3]);
      if (marks.selected >= 0) this._outline(context, this.box(marks.selected), this.theme.ink, 3, []);
    });
    this._gutter(context);
    return level;
  }

  /* Draw inside the axes, from their upper left corner. */
  clipped(context, draw) {
    context.save();
    context.beginPath();
    context.rect(this.left, this.top, this.width, this.height);
    context.clip();
    context.translate(this.left, this.top);
    draw();
    context.restore();
  }

  /* Draw everything except texts and marks, unless the raster has it already; returns the level. */
  _fill(raster, marks) {
    const { rows, theme } = this, short = (value) => +value.toPrecision(9), { t0, t1, y0, y1 } = this.view;
    const what = marks.showsHeld ? (marks.held?.values ? "held" : "waits") : "work";
    const window_ = `${what} ${[t0, t1, y0, y1, ...(theme.ticks || [])].map(short).join(" ")}`;
    const held = raster.held;
    if (held && held.rows === rows && held.theme === theme && held.window === window_) {
      this.boxes = held.boxes;
      return held.level;
    }
    raster.words.fill(theme.words.lane);
    const level = this.level;
    this.boxes = [];
    for (const t of theme.ticks || []) raster.fill(this.x(t), 0, this.x(t) + 1, this.height, theme.words.grid);
    if (marks.showsHeld && drawHeld(this, raster, marks)) { /* instead of work */ }
    else if (level === 0) this._bands(raster, rows.count);
    else this._rectangles(raster, level);
    this._failed(raster);
    this._separators(raster);
    raster.held = { rows, theme, window: window_, level, boxes: this.boxes };
    return level;
  }

  /* The paints of an operation, in the shade of its chunk. */
  paints(operation) {
    const { chunks, paints } = this.theme;
    if (!chunks || chunks.length < 2) return paints;
    return chunks[Math.min(Math.floor(this.table.stage[operation] / this.table.stages_per_chunk), chunks.length - 1)];
  }

  _bands(raster) {
    const { rows, table } = this, first = bandRows(rows, this.perRow / this.ratio);
    const shares = new Shares(table, this.width), colours = table.busy.map((paint) => this.theme.paints[paint].fill);
    for (let band = 0; band + 1 < first.length; band++) {
      const y0 = this.y(first[band]), y1 = this.y(first[band + 1]);
      if (y1 <= 0 || y0 >= this.height) continue;
      this._stack(raster, shares, colours, first[band], first[band + 1], y0, y1);
    }
  }

  _stack(raster, shares, colours, row, end, y0, y1) {
    const columnShares = shares.of(this.rows, row, end, this.view.t0, this.perTime), edge = y1 - y0 > 6 ? 1 : 0;
    for (let x = 0; x < this.width; x++) raster.stack(x, y0 + edge, y1, columnShares, colours, shares.stride, x);
  }

  _rectangles(raster, level) {
    const { table, theme, view } = this, tall = this.perRow, away = table.bits.REROUTED, broken = table.bits.VIOLATION;
    const parts = table.kinds.map((kind) => kind.parts), shares = new Shares(table, this.width);
    const colours = table.busy.map((paint) => theme.paints[paint].fill), gap = tall >= 6 ? 1 : 0;
    for (let row = this.row0; row < this.row1; row++) {
      const lane = this.rows.lane(row), middle = (row + 0.5 - view.y0) * tall;
      if (lane < 0) { this._stack(raster, shares, colours, row, row + 1, this.y(row), this.y(row + 1)); continue; }
      const end = table.beganBefore(lane, view.t1);
      for (let i = table.firstAfter(lane, view.t0); i < end; i++) {
        const begin = table.start[i], long = table.end[i] - begin, flags = table.flags[i], list = parts[table.kind[i]];
        if (long <= 0 && !(flags & broken)) continue; // only a finding is drawn without duration
        for (const [paint, first, last, top, bottom] of list) {
          const x0 = this.x(begin + first * long), x1 = this.x(begin + last * long);
          const y0 = Math.round(middle + top * tall), y1 = Math.max(y0 + 1, Math.round(middle + bottom * tall));
          if (x1 <= 0 || x0 >= this.width) continue;
          const colour = this.paints(i)[paint], busy = table.isWork[table.kind[i]];
          const right = last === 1 && x1 - x0 > 3 ? x1 - gap : Math.max(x1, x0 + 1);
          if (!busy && flags & broken) { raster.fill(x0 - 2, y0 - 3, right + 2, y1 + 2, theme.failure.line); continue; }
          raster.fill(x0, y0, right, y1, colour.fill);
          if (!busy || y1 - y0 < 4) continue;
          if (flags & away) {
            raster.stripe(x0, y0, right, y1, colour.hatch, 7 * this.ratio, 2.4 * this.ratio);
            raster.frame(x0, y0, right, y1, theme.words.border, Math.max(1, Math.round(this.ratio)));
          }
          if (flags & broken) raster.frame(x0, y0, right, y1, theme.failure.line, 2 * Math.max(1, Math.round(this.ratio)));
        }
        if (level === 2 && (table.end[i] - Math.max(begin, view.t0)) * this.perTime >= (tall < UPRIGHT_LANE * this.ratio ? LABEL_OPERATION : UPRIGHT) * this.ratio) this.boxes.push(i, row);
      }
    }
  }

  /* [lane, row] of each visible failed lane. */
  get failedRows() {
    const { rows, row0, row1 } = this, failed = this.table.failed.map((lane) => [lane, rows.rowOf[lane]]);
    return failed.filter(([lane, row]) => rows.lane(row) === lane && row >= row0 && row < row1);
  }

  /* Failed lanes: stripes and a border, at any level. */
  _failed(raster) {
    const { failure } = this.theme;
    for (const [lane, row] of this.failedRows) {
      const y0 = this.y(row), y1 = Math.max(y0 + 2, this.y(row + 1));
      if (this.table.offsets[lane + 1] === this.table.offsets[lane] || y1 - y0 < 8) raster.fill(0, y0, this.width, y1, failure.fill);
      raster.stripe(0, y0, this.width, y1, failure.hatch, 9 * this.ratio, 3 * this.ratio);
      raster.fill(0, y0, this.width, y0 + 1, failure.line);
      raster.fill(0, y1 - 1, this.width, y1, failure.line);
    }
  }

  /* Lines between groups, and between the workers of interleaved timelines. */
  _separators(raster) {
    const { each } = this.table;
    for (let row = this.row0; each && row < this.row1; row++) if (this.rows.lane(row) % each === 0) raster.fill(0, this.y(row), this.width, this.y(row) + 1, this.theme.words.rule);
    if (!this.rows.hasGroups) return;
    const thick = this.perRow >= 6 ? Math.max(1, Math.round(this.ratio)) : 1;
    for (const group of this.rows.groups) {
      const y = this.y(group.top);
      if (group.top && (group.bottom - group.top) * this.perRow >= 16 * this.ratio) raster.fill(0, y, this.width, y + thick, this.theme.words.rule);
    }
  }

  /* Labels of operations, reduced to fit, and of backwards of pairs below. */
  _labels(context) {
    const { table, theme, boxes } = this, size = Math.min(13 * this.ratio, Math.round(this.perRow * 0.5)), away = table.bits.REROUTED;
    if (boxes.length / 2 > MAX_LABELS || size < MIN_TEXT * this.ratio) return;
    context.textAlign = "center";
    context.textBaseline = "middle";
    let font = "";
    const use = (next) => { if (next !== font) context.font = font = next; }; // setting a font is slow
    const write = (i, row, [paint, first, last, top, bottom], text, weight, letters) => {
      const begin = table.start[i], long = table.end[i] - begin, high = (bottom - top) * this.perRow;
      const x0 = Math.max(0, (begin + first * long - this.view.t0) * this.perTime), x1 = Math.min(this.width, (begin + last * long - this.view.t0) * this.perTime);
      use(`${weight}${letters}px ${theme.font}`);
      const wide = context.measureText(text).width, middle = [(x0 + x1) / 2, (row + 0.5 - this.view.y0 + (top + bottom) / 2) * this.perRow + this.ratio];
      const isUpright = x1 - x0 < SMALLEST * wide && high >= SMALLEST * wide && x1 - x0 >= 0.8 * letters, fit = (isUpright ? high : x1 - x0) / wide;
      if (fit < SMALLEST || (!isUpright && high < 0.8 * letters)) return;
      if (fit < 1) use(`${weight}${(fit < SMALL ? SMALLEST : SMALL) * letters}px ${theme.font}`);
      context.fillStyle = this.paints(i)[paint].ink;
      context.save();
      context.translate(...middle);
      if (isUpright) context.rotate(-Math.PI / 2);
      context.fillText(text, 0, 0);
      context.restore();
    };
    for (let k = 0; k < boxes.length; k += 2) {
      const i = boxes[k], row = boxes[k + 1], { parts } = table.kinds[table.kind[i]], text = table.label(i), below = table.backwardLabel(i, this.rows.lane(row));
      const [, lower] = parts, small = Math.min(size, Math.round(this.perRow * 0.3));
      if (text) write(i, row, parts[0], text, table.flags[i] & away ? "600 " : "", below ? small : size);
      if (below) write(i, row, [lower[0], 0, 1, lower[3], lower[4]], below, "", small);
    }
  }

  failedLabels(context) {
    if (this.perRow < 14 * this.ratio) return;
    const { table, theme } = this, size = Math.min(12 * this.ratio, this.perRow * 0.5);
    for (const [lane, row] of this.failedRows) {
      const isIdle = table.offsets[lane + 1] === table.offsets[lane];
      const left = (wide) => (isIdle ? (this.width - wide) / 2 : this.width - wide - 6 * this.ratio);
      drawTag(context, "failed", theme.failure.mark, theme.failure.ink, { size, font: theme.font, left, top: (row + 0.5 - this.view.y0) * this.perRow - 0.75 * size });
    }
  }

  /* [x, y, width, height] of an operation's box, at least a few pixels. */
  box(operation) {
    const { table } = this, row = this.rows.rowOf[table.laneOf(operation)], parts = table.kinds[table.kind[operation]].parts;
    const top = Math.min(...parts.map((part) => part[3])), bottom = Math.max(...parts.map((part) => part[4]));
    const x0 = (table.start[operation] - this.view.t0) * this.perTime, x1 = (table.end[operation] - this.view.t0) * this.perTime;
    const y = (row + 0.5 - this.view.y0) * this.perRow;
    return [x0, y + top * this.perRow, Math.max(3, x1 - x0), Math.max(3, (bottom - top) * this.perRow)];
  }

  /* The same of a place of a lane. */
  placeBox({ lane, from, to }) {
    const x = (from - this.view.t0) * this.perTime, y = (this.rows.rowOf[lane] - this.view.y0 + 0.04) * this.perRow, least = 4 * this.ratio;
    return [x, y, Math.max(least, (to - from) * this.perTime), Math.max(least, 0.92 * this.perRow)];
  }

  _outline(context, [x, y, width, height], colour, wide, dash) {
    const box = new Path2D();
    if (x + width < 0 || x > this.width || y + height < 0 || y > this.height) return;
    box.rect(x, y, width, height);
    outline(context, box, colour, wide, this, dash);
  }

  /* The critical path: a dark line under its operations, joined from one to the next. */
  _path(context) {
    const { table } = this, critical = [], bit = table.bits.CRITICAL, path = new Path2D();
    for (let i = 0; i < table.length; i++) if (table.flags[i] & bit) critical.push(i);
    for (const i of critical.sort((a, b) => table.start[a] - table.start[b] || table.end[a] - table.end[b])) {
      const [x, y, width, height] = this.box(i);
      path.lineTo(x, y + height);
      path.lineTo(x + width, y + height);
    }
    outline(context, path, this.theme.ink, 2, this);
  }

  /* Arrows from inputs and to consumers; the awaited input is solid. */
  _links(context, links, selected) {
    const arrow = (from, to, strong) => {
      const a = this.box(from), b = this.box(to);
      const [x0, y0, x1, y1] = [a[0] + a[2], a[1] + a[3] / 2, b[0], b[1] + b[3] / 2];
      const bend = Math.max(12 * this.ratio, Math.abs(x1 - x0) / 2), head = 5 * this.ratio, lift = this.perRow * (y0 > this.perRow ? 0.8 : -0.8);
      const path = new Path2D(), tip = new Path2D(`M${x1 + head} ${y1}L${x1 - head} ${y1 - head}V${y1 + head}Z`);
      path.moveTo(x0, y0);
      if (Math.abs(y1 - y0) < 1) path.bezierCurveTo(x0, y0 - lift, x1 - head, y0 - lift, x1 - head, y1);
      else path.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1, y1);
      outline(context, path, this.theme.ink, strong ? 2.5 : 1.2, this);
      context.fillStyle = this.theme.ink;
      context.fill(tip);
    };
    for (const from of links.inputs) arrow(from, selected, from === links.waited);
    for (const to of links.outputs) arrow(selected, to, false);
  }

  /* Names of lanes and groups left of the axes, as far as there is room. */
  _gutter(context) {
    const { table, rows, theme, ratio } = this, size = 12 * ratio, room = 14 * ratio;
    const every = Math.max(1, Math.ceil(room / this.perRow)), grouped = rows.hasGroups;
    context.textBaseline = "middle";
    context.font = `${size}px ${theme.font}`;
    const longest = table.labels.reduce((most, label) => (label.length > most.length ? label : most), "");
    const laneRoom = this.perRow >= room, names = context.measureText(longest + (rows.isAlike ? ` × ${table.lanes}` : "")).width;
    if (grouped) this._groups(context, size, room, laneRoom);
    context.font = `${Math.min(size, Math.max(9 * ratio, this.perRow * 0.5))}px ${theme.font}`;
    context.textAlign = "right";
    if (laneRoom || !grouped) {
      for (let row = this.row0; row < this.row1; row += laneRoom ? 1 : every) {
        const lane = rows.lane(row), y = (row + 0.5 - this.view.y0) * this.perRow;
        if (lane < 0 || y < 0 || y > this.height) continue;
        context.fillStyle = theme.ink;
        context.fillText(`${table.labels[lane]}${rows.size(row) > 1 ? ` × ${rows.size(row)}` : ""}`, this.left - 8 * ratio, this.top + y);
        if (!laneRoom || table.isFailed[lane] || typeof table.halt === "number") continue;
        context.fillStyle = theme.muted;
        context.fillText(percent(table.busyShare[lane]), this.left - names - 14 * ratio, this.top + y);
      }
    }
    for (const lane of table.failed) {
      const row = rows.rowOf[lane], y = (row + 0.5 - this.view.y0) * this.perRow;
      if (laneRoom || y < 0 || y > this.height) continue;
      context.fillStyle = theme.failure.mark;
      context.fillText("✕", this.left - 2 * ratio, this.top + y);
    }
  }

  _groups(context, size, room, laneRoom) {
    const { rows, theme, ratio, table } = this;
    context.font = `600 ${size}px ${theme.font}`;
    context.textAlign = "left";
    let free = -Infinity;
    for (const group of rows.groups) {
      const y0 = Math.max(0, (group.top - this.view.y0) * this.perRow), y1 = Math.min(this.height, (group.bottom - this.view.y0) * this.perRow);
      if (y1 <= y0) continue;
      const y = laneRoom ? y0 + Math.min(this.perRow, y1 - y0) / 2 : (y0 + y1) / 2;
      if (y - room / 2 < free) continue;
      free = y + room / 2;
      context.fillStyle = theme.ink;
      const text = `${group.shut ? "▸" : "▾"} ${group.name}${group.shut ? ` (${group.size})` : ""}`;
      context.fillText(text, 6 * ratio, this.top + y);
      if (y1 - y < 2.2 * room || typeof table.halt === "number") continue;
      const lanes = Array.from(rows.order.subarray(rows.first[group.top], rows.first[group.bottom])).filter((lane) => !table.isFailed[lane]);
      context.font = `${0.92 * size}px ${theme.font}`;
      context.fillStyle = theme.muted;
      context.fillText(`${percent(lanes.reduce((sum, lane) => sum + table.busyShare[lane], 0) / (lanes.length || 1))} busy`, 18 * ratio, this.top + y + room * 1.05);
      context.font = `600 ${size}px ${theme.font}`;
    }
  }
}

/* Stroke a path, with a border in the colour of the page. */
export function outline(context, path, colour, wide, { theme, ratio }, dash = []) {
  for (const [stroke, width, lengths] of [[theme.paper, wide + 2, []], [colour, wide, dash]]) {
    context.strokeStyle = stroke;
    context.lineWidth = width * ratio;
    context.setLineDash(lengths.map((length) => length * ratio));
    context.stroke(path);
  }
  context.setLineDash([]);
}

/* Draw text on a filled ground; `left` returns its position for a width. */
export function drawTag(context, text, ground, ink, { size, font, left, top }) {
  context.font = `600 ${size}px ${font}`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  const wide = context.measureText(text).width + size, x = left(wide);
  context.fillStyle = ground;
  context.fillRect(x, top, wide, 1.5 * size);
  context.fillStyle = ink;
  context.fillText(text, x + wide / 2, top + 0.8 * size);
}

const percent = (share) => `${Math.round(100 * share)} %`;
