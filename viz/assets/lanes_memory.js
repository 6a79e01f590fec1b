/* The memory strip: what the selected worker holds over time, under the lanes and on their axis, with its limit and peak.
   It draws whenever the lanes do; what is drawn came with the details of the selection. */
(function (recycle) {
  "use strict";
  const HEIGHT = 96, TOP = 18, BOTTOM = 6;

  recycle.memoryStrip = function (view, picture) {
    const place = view.root.querySelector(".lanes-memory"), memory = view.memory;
    place.hidden = !view.showsMemory;
    if (!view.showsMemory) return;
    if (!place.firstChild) place.append(recycle.element("canvas", { role: "img" }));
    const canvas = place.firstChild;
    const { ratio, theme, left, width } = picture, wide = view.canvas.width;
    Object.assign(canvas, { width: wide, height: HEIGHT * ratio });
    Object.assign(canvas.style, { width: `${wide / ratio}px`, height: `${HEIGHT}px` });
    const context = canvas.getContext("2d"), top = TOP * ratio, high = (HEIGHT - TOP - BOTTOM) * ratio, size = 12 * ratio;
    context.font = `${size}px ${theme.font}`;
    context.textBaseline = "middle";
    context.fillStyle = theme.lane;
    context.fillRect(left, top, width, high);
    context.fillStyle = theme.ink;
    const words = memory ? text(memory, view.table) : "Memory: select an operation or a worker";
    canvas.setAttribute("aria-label", words);
    context.fillText(words, left, top / 2);
    if (!memory) return;
    const most = Math.max(memory.peak, memory.limit || 0, 1) * 1.08;
    const x = (t) => left + (t - picture.view.t0) * picture.perTime, y = (held) => top + high * (1 - held / most);
    context.textAlign = "right";
    for (const value of new Set([0, memory.peak, ...(memory.limit === null ? [] : [memory.limit])])) {
      context.fillText(String(+value.toPrecision(4)), left - 8 * ratio, Math.min(y(value), top + high - size / 2));
    }
    context.save();
    context.beginPath();
    context.rect(left, top, width, high);
    context.clip();
    curve(context, memory, x, y, theme, ratio);
    if (memory.limit !== null) {
      context.strokeStyle = theme.failure.mark;
      context.setLineDash([6 * ratio, 4 * ratio]);
      line(context, left, y(memory.limit), left + width, y(memory.limit), 2 * ratio);
      context.setLineDash([]);
    }
    context.fillStyle = theme.ink;
    context.beginPath();
    context.arc(x(memory.peak_time), y(memory.peak), 4 * ratio, 0, 7);
    context.fill();
    context.restore();
  };

  function text(memory, table) {
    const peak = `most ${+memory.peak.toPrecision(4)} at ${table.time(memory.peak_time)}${memory.peak_set_by && ` by ${memory.peak_set_by}`}`;
    return `Activations held by ${memory.worker}: ${peak}${memory.limit === null ? "" : `, limit ${memory.limit} (dashed)`}`;
  }

  function curve(context, { time, held }, x, y, theme, ratio) {
    context.beginPath();
    context.moveTo(x(time[0]), y(0));
    for (let i = 0; i < time.length; i++) {
      if (i) context.lineTo(x(time[i]), y(held[i - 1]));
      context.lineTo(x(time[i]), y(held[i]));
    }
    context.lineTo(x(time[time.length - 1]), y(0));
    context.fillStyle = theme.memory;
    context.fill();
    context.strokeStyle = theme.ink;
    context.lineWidth = ratio;
    context.stroke();
  }

  function line(context, x0, y0, x1, y1, wide) {
    context.lineWidth = wide;
    context.beginPath();
    context.moveTo(x0, y0);
    context.lineTo(x1, y1);
    context.stroke();
  }

  /* What every worker holds, in its lane in place of its work: one scale for all lanes, with each one's limit. The values come
     from the server once per table (viz/analysis/memory.py), when they are first asked for. */

  const HEADER = 8, LEAST_LANE = 6, LEAST_TEXT = 15;

  /* {limits, from, after, most, inBytes} of the table of a view; null until they are there. */
  function values(view) {
    const address = view.root.dataset.address.replace("lanes/", "held/");
    if (view.held && view.held.address === address) return view.held.found;
    const asked = { address, found: null };
    view.held = asked;
    recycle.bytes(address).then((buffer) => {
      const head = new DataView(buffer), lanes = head.getUint32(0, true), length = view.table.length;
      const limits = new Float32Array(buffer, HEADER, lanes), from = new Float32Array(buffer, HEADER + 4 * lanes, length);
      const after = new Float32Array(buffer, HEADER + 4 * (lanes + length), length);
      const most = Math.max(...[from, limits].map((all) => all.reduce((high, value) => (value > high ? value : high), 0)), 1e-9);
      asked.found = { limits, from, after, most: most * 1.05, inBytes: head.getUint32(4, true) === 1 };
      view.redraw();
    }, () => { view.showsHeld = false; view.announce("Nothing is known of the memory of these lanes."); });
    return null;
  }

  /* Most held in each pixel column by any lane of rows [row, end). */
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

  const bandsOf = (picture) => (picture.perRow < LEAST_LANE * picture.ratio
    ? recycle.bandRows(picture.rows, picture.perRow / picture.ratio) : Array.from({ length: picture.rows.count + 1 }, (_, row) => row));

  /* Into the raster, in place of work; false while the values are not there. */
  recycle.drawHeld = function (picture, raster, view) {
    const found = values(view);
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
  };

  const size = (value, inBytes) => (inBytes ? `${+(value / 1e9).toPrecision(3)} GB` : String(+value.toPrecision(4)));

  /* Limits and peaks over the lanes. */
  recycle.heldMarks = function (picture, context, view) {
    const found = view.showsHeld && values(view);
    if (!found || picture.perRow < LEAST_LANE * picture.ratio) return;
    const { table, rows, row0, row1, perRow, ratio, theme, width } = picture, letters = Math.min(12 * ratio, perRow * 0.45);
    context.textAlign = "left";
    context.textBaseline = "top";
    context.font = `${letters}px ${theme.font}`;
    for (let row = row0; row < row1; row++) {
      const lane = rows.lane(row);
      if (lane < 0 || table.isFailed[lane]) continue;
      const bottom = (row + 1 - picture.view.y0) * perRow, limit = found.limits[lane];
      if (!Number.isNaN(limit)) {
        context.strokeStyle = theme.failure.mark;
        context.lineWidth = 1.5 * ratio;
        context.setLineDash([6 * ratio, 4 * ratio]);
        const y = bottom - (limit / found.most) * (perRow - 1);
        context.beginPath();
        context.moveTo(0, y);
        context.lineTo(width, y);
        context.stroke();
        context.setLineDash([]);
      }
      if (perRow < LEAST_TEXT * ratio) continue;
      let peak = 0;
      for (let i = table.offsets[lane]; i < table.offsets[lane + 1]; i++) if (found.from[i] > peak) peak = found.from[i];
      const text = `${size(peak, found.inBytes)}${Number.isNaN(limit) ? "" : ` of ${size(limit, found.inBytes)}`}`;
      context.fillStyle = peak > limit * (1 + 1e-6) ? theme.failure.mark : theme.ink;
      context.fillText(text, 6 * ratio, bottom - perRow + Math.min(8 * ratio, 0.3 * perRow));
    }
  };
})(window.recycle = window.recycle || {});
