/* A pixel buffer for rectangles, stripes and stacked shares, for a hundred thousand rectangles per frame. */
const little = new Uint8Array(new Uint32Array([1]).buffer)[0] === 1;

/* "#RRGGBB" as a word of an ImageData. */
export function colourWord(colour) {
  const rgb = parseInt(colour.slice(1), 16), [r, g, b] = [rgb >> 16, (rgb >> 8) & 255, rgb & 255];
  return (little ? (255 << 24) | (b << 16) | (g << 8) | r : (r << 24) | (g << 16) | (b << 8) | 255) >>> 0;
}

/* Mean of two colour words, `share` of the second. */
function mix(first, second, share) {
  let mean = 0;
  for (let shift = 0; shift < 32; shift += 8) {
    const a = (first >>> shift) & 255, b = (second >>> shift) & 255;
    mean |= Math.round(a + (b - a) * share) << shift;
  }
  return mean >>> 0;
}

export class Raster {
  constructor(width, height) {
    this.image = new ImageData(Math.max(1, width), Math.max(1, height));
    this.width = this.image.width;
    this.height = this.image.height;
    this.words = new Uint32Array(this.image.data.buffer);
  }

  fill(x0, y0, x1, y1, colour) {
    x0 = x0 < 0 ? 0 : x0; x1 = x1 > this.width ? this.width : x1;
    y0 = y0 < 0 ? 0 : y0; y1 = y1 > this.height ? this.height : y1;
    const { words, width } = this, long = x1 - x0;
    if (long <= 0) return;
    for (let y = y0, at = y0 * width + x0; y < y1; y++, at += width) {
      if (long > 12) words.fill(colour, at, at + long);
      else for (let i = at; i < at + long; i++) words[i] = colour;
    }
  }

  /* Diagonal stripes of `wide` pixels in every `period` pixels, aligned to the page. */
  stripe(x0, y0, x1, y1, colour, period, wide) {
    const right = Math.min(this.width, x1), bottom = Math.min(this.height, y1);
    for (let y = Math.max(0, y0); y < bottom; y++) {
      for (let x = Math.max(0, x0), at = y * this.width + x; x < right; x++, at++) {
        if ((x + y) % period < wide) this.words[at] = colour;
      }
    }
  }

  frame(x0, y0, x1, y1, colour, wide) {
    for (const y of [y0, y1 - wide]) this.fill(x0, y, x1, y + wide, colour);
    for (const x of [x0, x1 - wide]) this.fill(x, y0, x + wide, y1, colour);
  }

  /* One column of stacked shares from y1 upwards; the rest keeps its colour. A pixel shared by two colours takes their mean, so
     that the area of each colour is exact. */
  stack(x, y0, y1, shares, colours, stride, at) {
    const tall = y1 - y0;
    let full = 0, carried = 0, blend = 0;
    let y = y1 - 1;
    for (let part = 0; part < colours.length; part++, at += stride) {
      let left = shares[at] * tall;
      if (left <= 0) continue;
      if (carried > 0) {
        const room = Math.min(1 - carried, left), place = y * this.width + x;
        blend = mix(blend, colours[part], room / (carried + room));
        carried += room;
        left -= room;
        if (carried < 1 - 1e-6) continue;
        if (y >= 0 && y < this.height) this.words[place] = blend;
        carried = 0;
        y--;
      }
      for (full = Math.floor(left + 1e-6); full > 0 && y >= y0; full--, y--) {
        if (y >= 0 && y < this.height) this.words[y * this.width + x] = colours[part];
      }
      carried = left - Math.floor(left + 1e-6);
      if (carried < 1e-6) carried = 0;
      blend = colours[part];
    }
    if (carried > 0 && y >= y0 && y >= 0 && y < this.height) {
      const place = y * this.width + x;
      this.words[place] = mix(this.words[place], blend, carried);
    }
  }
}

/* Utilisation: where lanes or operations are thinner than a few pixels, rows are merged into bands. Each pixel column of a
   band stacks the exact shares of time of each colour; the rest is bubble.

   An operation from a to b covers b - a of column floor(a) if it ends there, else floor(a) + 1 - a of its first column, 1 of
   inner ones and b - floor(b) of its last. `part` has the ends, `from` a difference array of the rest. */

const MIN_BAND = 12;

/* First rows of the bands. A group is cut into bands of at least MIN_BAND pixels; groups lower than half of that are merged, so
   bands keep their lanes when the window moves. */
export function bandRows(rows, rowPixels) {
  const first = [], blocks = rows.hasGroups ? rows.groups : [{ top: 0, bottom: rows.count }];
  let begun = -Infinity;
  for (const { top, bottom } of blocks) {
    if ((top - begun) * rowPixels < MIN_BAND / 2) continue;
    begun = top;
    const bands = Math.max(1, Math.floor(((bottom - top) * rowPixels) / MIN_BAND + 1e-9));
    for (let band = 0; band < Math.min(bands, bottom - top); band++) {
      first.push(top + Math.round((band * (bottom - top)) / Math.min(bands, bottom - top)));
    }
  }
  first.push(rows.count);
  return first;
}

/* Shares of each busy colour in each column, over the lanes of rows [row, end): colour-major, columns + 1 per colour. */
export class Shares {
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
