/* lanes.bin as typed arrays (layout: viz/lane_cache.py). Operations of a lane are sorted by start; `reach` is the latest end
   so far in the lane, for binary search although transfers overlap later operations. */
const HEADER = 24, TYPES = { f4: Float32Array, u1: Uint8Array, u2: Uint16Array, u4: Uint32Array };

export class Table {
  constructor(buffer) {
    const head = new DataView(buffer);
    const magic = String.fromCharCode(...new Uint8Array(buffer, 0, 4));
    if (magic !== "RLN2") throw new Error("not a lanes.bin");
    this.lanes = head.getUint32(4, true);
    this.length = head.getUint32(8, true);
    this.origin = head.getFloat64(16, true);
    this.offsets = new Uint32Array(buffer, HEADER, this.lanes + 1);
    const described = new Uint8Array(buffer, buffer.byteLength - head.getUint32(12, true));
    Object.assign(this, JSON.parse(new TextDecoder().decode(described)));
    let place = HEADER + this.offsets.byteLength;
    for (const [name, type] of Object.entries(this.columns)) {
      this[name] = new TYPES[type](buffer, place, this.length);
      place += Math.ceil(this[name].byteLength / 4) * 4;
    }
    this.isFailed = new Uint8Array(this.lanes);
    for (const lane of this.failed) this.isFailed[lane] = 1;
    // a transfer does not keep the worker busy
    this.isWork = this.kinds.map((kind) => !kind.transfer);
    this.reach = this._reach();
  }

  _reach() {
    const { offsets, end } = this, reach = new Float32Array(this.length);
    for (let lane = 0; lane < this.lanes; lane++) {
      let latest = -Infinity;
      for (let i = offsets[lane]; i < offsets[lane + 1]; i++) reach[i] = latest = end[i] > latest ? end[i] : latest;
    }
    return reach;
  }

  /* Share of the whole time that each lane is busy. */
  get busyShare() {
    if (Object.hasOwn(this, "shares")) return this.shares;
    this.shares = new Float32Array(this.lanes);
    for (let lane = 0; lane < this.lanes; lane++) {
      for (let i = this.offsets[lane]; i < this.offsets[lane + 1]; i++) if (this.isWork[this.kind[i]]) this.shares[lane] += (this.end[i] - this.start[i]) / (this.span || 1);
    }
    return this.shares;
  }

  /* The operations of a lane. */
  operations(lane) { return Array.from({ length: this.offsets[lane + 1] - this.offsets[lane] }, (_, place) => this.offsets[lane] + place); }

  /* First operation of the lane that may end after t. */
  firstAfter(lane, t) { return partition(this.reach, this.offsets[lane], this.offsets[lane + 1], (value) => value <= t); }

  /* End of the operations of the lane that begin before t. */
  beganBefore(lane, t) { return partition(this.start, this.offsets[lane], this.offsets[lane + 1], (value) => value < t); }

  laneOf(operation) { return partition(this.offsets, 1, this.lanes + 1, (value) => value <= operation) - 1; }

  /* The operation at time t and height y in its lane (0: middle, -0.5: top); -1 if there is none. */
  at(lane, t, y) {
    for (let i = partition(this.start, this.offsets[lane], this.offsets[lane + 1], (value) => value <= t) - 1;
      i >= this.offsets[lane] && this.reach[i] > t; i--) {
      if (this.end[i] <= t) continue;
      const share = (t - this.start[i]) / (this.end[i] - this.start[i]);
      for (const [, first, last, top, bottom] of this.kinds[this.kind[i]].parts) {
        if (share >= first && share < last && y >= top && y < bottom) return i;
      }
    }
    return -1;
  }

  /* Gaps [from, to) of a lane's work, from 0 to the end of the timeline. */
  gaps(lane) {
    const gaps = [];
    let idle = 0;
    for (let i = this.offsets[lane]; i < this.offsets[lane + 1]; i++) {
      if (!this.isWork[this.kind[i]]) continue;
      if (this.start[i] > idle) gaps.push([idle, this.start[i]]);
      idle = Math.max(idle, this.end[i]);
    }
    if (this.span > idle) gaps.push([idle, this.span]);
    return gaps;
  }

  /* The gap of a lane at time t; null inside work or outside the timeline. */
  gapAt(lane, t) { return this.gaps(lane).find(([from, to]) => t >= from && t < to) || null; }

  /* The next operation of the lane in direction 1 or -1 that `accept` allows; -1 if there is none. */
  next(operation, dir, accept = () => true) {
    const all = this.operations(this.laneOf(operation)).filter(accept);
    return (dir > 0 ? all.find((i) => i > operation) : all.findLast((i) => i < operation)) ?? -1;
  }

  has(operation, flag) { return (this.flags[operation] & this.bits[flag]) !== 0; }

  home(operation) { return this.kinds[this.kind[operation]].homed ? `${this.pipeline[operation]}.${this.micro_batch[operation]}` : ""; }

  instruction(operation) { return `${this.stage[operation]}${this.kinds[this.kind[operation]].token}${this.home(operation)}`; }

  /* Label of the box (viz/kinds.py). */
  label(operation) {
    const { letter, numbered } = this.kinds[this.kind[operation]], { label, label_away } = this.texts;
    if (!numbered) return letter;
    const values = { letter, micro_batch: this.micro_batch[operation], home: this.home(operation) };
    return fill(this.has(operation, "REROUTED") ? label_away : label, values);
  }

  /* Label of an overlapped pair's backward, drawn below its forward; "" for others. */
  backwardLabel(operation, lane) {
    if (!this.micro_batch2 || !this.kinds[this.kind[operation]].pair) return "";
    const home = this.pipeline2[operation], index = this.micro_batch2[operation], { label, label_away } = this.texts;
    return fill(home === this.pipelines[lane] ? label : label_away, { letter: "B", micro_batch: index, home: `${home}.${index}` });
  }

  /* A time in the unit of the table: [factor, word]. */
  time(value) {
    const [scale, word] = this.unit, text = String(+(value * scale).toPrecision(6));
    return word ? `${text} ${word}` : text;
  }

  /* Description of an operation, in lines (viz/kinds.py). */
  describe(operation, lane) {
    const start = this.start[operation], end = this.end[operation], kind = this.kinds[this.kind[operation]];
    const place = this.has(operation, "REROUTED") ? "away" : "at home";
    const values = {
      instruction: this.instruction(operation), title: kind.title, worker: this.labels[lane], stage: this.stage[operation],
      start: this.time(start), end: this.time(end), takes: this.time(end - start), pipeline: this.pipeline[operation],
    };
    const holds = (when) => when === "always" || (kind.homed && when === place) || (when in this.bits && this.has(operation, when));
    return this.texts.lines.filter(([when]) => holds(when)).map(([, line]) => fill(line, values));
  }
}

function fill(template, values) { return template.replace(/{(\w+)}/g, (_, name) => values[name]); }

/* First place in [low, high) for which `before` is false; `before` holds for a leading part only. */
function partition(values, low, high, before) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (before(values[middle])) low = middle + 1; else high = middle;
  }
  return low;
}

const PACKED = "data:application/gzip;base64,";
export const fetchBytes = (address) => {
  if (address.startsWith(PACKED)) return unpacked(address.slice(PACKED.length));
  return fetch(address).then((answer) => (answer.ok ? answer.arrayBuffer() : Promise.reject(new Error(`${address}: ${answer.status}`))));
};

/* Lanes embedded in the page. */
function unpacked(text) {
  const packed = new Blob([Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0))]);
  return new Response(packed.stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}

const tables = new Map(), MAX_KEPT = 8;

/* The table of an address, decoded once; recent ones are cached. `bytes` returns its content or the table itself. */
export function fetchTable(address, bytes = () => fetchBytes(address)) {
  const cached = tables.get(address);
  tables.delete(address);
  const table = cached || Promise.resolve(bytes()).then((content) => Object.assign(content instanceof Table ? content : new Table(content), { address }));
  table.catch(() => tables.delete(address));
  tables.set(address, table);
  if (tables.size > MAX_KEPT) tables.delete(tables.keys().next().value);
  return table;
}

/* An answer of the server (viz/pages/lanes_view.py): its JSON, and the tables of its `addresses`, null for a missing one. */
export async function unpackAnswer(buffer) {
  const blocks = [], head = new DataView(buffer);
  for (let at = 0; at < buffer.byteLength;) {
    const length = head.getUint32(at, true);
    blocks.push(buffer.slice(at + 4, at + 4 + length));
    at += 4 + length + (-length & 3);
  }
  const content = JSON.parse(new TextDecoder().decode(blocks[0]));
  const tables = (content.addresses || []).map((address, place) => address && fetchTable(address, () => blocks[1 + place]));
  return { ...content, tables: await Promise.all(tables) };
}
