/* lanes.bin as typed arrays (layout: viz/lane_cache.py), and the searches in it. Operations of a lane are sorted by start;
   `reach` is the latest end so far in the lane, so both ends of a time window are found by binary search even where
   transfers overlap what comes after them. */
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
    // A transfer, a strip below the lane's work, does not keep the worker busy.
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

  /* Share of the whole time that each lane spends at work. */
  get busyShare() {
    if (!Object.hasOwn(this, "shares")) {
      this.shares = new Float32Array(this.lanes);
      for (let lane = 0; lane < this.lanes; lane++) {
        let busy = 0;
        for (let i = this.offsets[lane]; i < this.offsets[lane + 1]; i++) if (this.isWork[this.kind[i]]) busy += this.end[i] - this.start[i];
        this.shares[lane] = busy / (this.span || 1);
      }
    }
    return this.shares;
  }

  /* First operation of the lane of which anything can lie after t. */
  firstAfter(lane, t) {
    return partition(this.reach, this.offsets[lane], this.offsets[lane + 1], (value) => value <= t);
  }

  /* End of the operations of the lane that begin before t. */
  beganBefore(lane, t) {
    return partition(this.start, this.offsets[lane], this.offsets[lane + 1], (value) => value < t);
  }

  laneOf(operation) {
    return partition(this.offsets, 1, this.lanes + 1, (value) => value <= operation) - 1;
  }

  /* The operation drawn at time t and height y in its lane (0 is the middle, -0.5 the top), -1 where there is none. */
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

  /* The gap [from, to) of the lane's work around t, null inside work or outside the timeline. */
  gapAt(lane, t) {
    let from = 0, to = this.span;
    for (let i = this.beganBefore(lane, t) - 1; i >= this.offsets[lane] && this.reach[i] > from; i--) {
      if (this.isWork[this.kind[i]]) from = Math.max(from, this.end[i]);
    }
    for (let i = this.beganBefore(lane, t); i < this.offsets[lane + 1]; i++) {
      if (this.isWork[this.kind[i]]) { to = this.start[i]; break; }
    }
    return t >= from && t < to && to > from ? [from, to] : null;
  }

  /* The next operation from `operation` in its lane, dir 1 or -1, of which `accept` is true; -1 when there is none. */
  next(operation, dir, accept = () => true) {
    const lane = this.laneOf(operation);
    for (let i = operation + dir; i >= this.offsets[lane] && i < this.offsets[lane + 1]; i += dir) {
      if (accept(i)) return i;
    }
    return -1;
  }

  has(operation, flag) { return (this.flags[operation] & this.bits[flag]) !== 0; }

  home(operation) {
    return this.kinds[this.kind[operation]].homed ? `${this.pipeline[operation]}.${this.micro_batch[operation]}` : "";
  }

  instruction(operation) {
    return `${this.stage[operation]}${this.kinds[this.kind[operation]].token}${this.home(operation)}`;
  }

  /* Text inside the box (viz/kinds.py). */
  label(operation) {
    const { letter, numbered } = this.kinds[this.kind[operation]], { label, label_away } = this.texts;
    if (!numbered) return letter;
    const values = { letter, micro_batch: this.micro_batch[operation], home: this.home(operation) };
    return fill(this.has(operation, "REROUTED") ? label_away : label, values);
  }

  /* The same of the backward of an overlapped pair, which is drawn below its forward; "" of anything else. */
  backwardLabel(operation, lane) {
    if (!this.micro_batch2 || !this.kinds[this.kind[operation]].pair) return "";
    const home = this.pipeline2[operation], index = this.micro_batch2[operation], { label, label_away } = this.texts;
    return fill(home === this.pipelines[lane] ? label : label_away, { letter: "B", micro_batch: index, home: `${home}.${index}` });
  }

  /* Times as people read them, in the unit of the table: [factor, word]. */
  time(value) {
    const [scale, word] = this.unit, text = String(+(value * scale).toPrecision(6));
    return word ? `${text} ${word}` : text;
  }

  /* Lines that describe an operation (viz/kinds.py). */
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

/* A template with its values. */
function fill(template, values) { return template.replace(/{(\w+)}/g, (_, name) => values[name]); }

/* First place in [low, high) of which `before` is false; `before` must hold for a leading part only. */
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
  return fetch(address).then((answer) => {
    if (!answer.ok) throw new Error(`${address}: ${answer.status}`);
    return answer.arrayBuffer();
  });
};

/* Lanes that the page itself holds. */
function unpacked(text) {
  const letters = atob(text), packed = new Uint8Array(letters.length);
  for (let i = 0; i < packed.length; i++) packed[i] = letters.charCodeAt(i);
  return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}

const kept = new Map(), MOST_KEPT = 8;

/* The table behind an address, fetched and decoded once; the most recent ones stay. `bytes` gives its content where that
   came with something else, or the table itself. */
export function fetchTable(address, bytes = () => fetchBytes(address)) {
  const known = kept.get(address);
  kept.delete(address);
  const table = known || Promise.resolve(bytes()).then((found) => Object.assign(found instanceof Table ? found : new Table(found), { address }));
  table.catch(() => kept.delete(address));
  kept.set(address, table);
  if (kept.size > MOST_KEPT) kept.delete(kept.keys().next().value);
  return table;
}
