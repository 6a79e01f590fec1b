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
})(window.recycle = window.recycle || {});
