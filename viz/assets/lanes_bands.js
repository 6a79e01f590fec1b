/* Utilisation: where a lane or an operation is thinner than a few pixels, rows are merged into bands, and each pixel
   column of a band is a stack of the exact shares of time that its lanes spend in each colour; what is left is bubble.

   An operation from a to b covers b - a of column floor(a) when it ends there; else floor(a) + 1 - a of its first column,
   1 of those between and b - floor(b) of its last. `part` holds the ends, `from` a difference array of the rest. */
(function (recycle) {
  "use strict";
  const LEAST = 12;

  /* First rows of the bands. A group is cut into bands of at least LEAST pixels; groups that are lower than half of that
     are merged to bands as high. So bands keep their lanes however the window moves. */
  recycle.bandRows = function (rows, rowPixels) {
    const first = [], blocks = rows.hasGroups ? rows.groups : [{ top: 0, bottom: rows.count }];
    let begun = -Infinity;
    for (const { top, bottom } of blocks) {
      if ((top - begun) * rowPixels < LEAST / 2) continue;
      begun = top;
      const bands = Math.max(1, Math.floor(((bottom - top) * rowPixels) / LEAST + 1e-9));
      for (let band = 0; band < Math.min(bands, bottom - top); band++) {
        first.push(top + Math.round((band * (bottom - top)) / Math.min(bands, bottom - top)));
      }
    }
    first.push(rows.count);
    return first;
  };

  /* Shares of each busy colour in each column, over the lanes of rows [row, end): colour-major, columns + 1 per colour. */
  class Shares {
    constructor(table, columns) {
      this.table = table;
      this.columns = columns;
      this.stride = columns + 2;
      this.part = new Float64Array(this.stride * table.busy.length);
      this.from = new Float64Array(this.stride * table.busy.length);
      // kind -> flat list of (colour, first, last, share of the lane's height)
      this.parts = table.kinds.map((kind) => {
        const work = kind.transfer ? [] : kind.parts;
        const top = Math.min(...work.map((part) => part[3])), bottom = Math.max(...work.map((part) => part[4]));
        return work.flatMap((part) => [table.busy.indexOf(part[0]), part[1], part[2], (part[4] - part[3]) / (bottom - top)]);
      });
    }

    of(rows, row, end, t0, perColumn) {
      const { table, part, from, stride, columns, parts } = this, t1 = t0 + columns / perColumn;
      const starts = table.start, ends = table.end, kinds = table.kind;
      part.fill(0);
      from.fill(0);
      const lanes = rows.first[end] - rows.first[row];
      for (let place = rows.first[row]; place < rows.first[end]; place++) {
        const lane = rows.order[place], last = table.beganBefore(lane, t1);
        for (let i = table.firstAfter(lane, t0); i < last; i++) {
          const begin = starts[i], long = ends[i] - begin, list = parts[kinds[i]];
          for (let p = 0; p < list.length; p += 4) {
            let a = (begin + list[p + 1] * long - t0) * perColumn, b = (begin + list[p + 2] * long - t0) * perColumn;
            if (a < 0) a = 0;
            if (b > columns) b = columns;
            if (b <= a) continue;
            const base = list[p] * stride, high = list[p + 3], ia = base + (a | 0), ib = base + (b | 0);
            if (ia === ib) { part[ia] += (b - a) * high; continue; }
            part[ia] += (ia - base + 1 - a) * high;
            part[ib] -= (ib - base + 1 - b) * high;
            from[ia + 1] += high;
            from[ib + 1] -= high;
          }
        }
      }
      for (let colour = 0; colour < table.busy.length; colour++) {
        for (let at = colour * stride, end_ = at + columns, under = 0; at < end_; at++) {
          under += from[at];
          part[at] = (part[at] + under) / lanes;
        }
      }
      return part;
    }
  }

  recycle.Shares = Shares;
})(window.recycle = window.recycle || {});
