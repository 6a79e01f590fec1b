/* Lanes of each row: pinned ones first, the others by pipeline or stage, a folded group as one row; or lanes that do the same
   at the same times as one row, drawn like one of them. Row r has lanes order[first[r]] to order[first[r + 1] - 1] and is drawn
   from y = r to y = r + 1. */

const PINNED = "pinned", ALIKE = "alike", GROUPINGS = ["pipeline", "stage", ALIKE];

export const nextGrouping = (grouping) => GROUPINGS[(GROUPINGS.indexOf(grouping) + 1) % GROUPINGS.length];

/* The first lane that is like each lane; the home pipelines of micro-batches may differ. */
function alikeLanes(table) {
  const known = new Map(), bits = [table.start, table.end].map(({ buffer, byteOffset, length }) => new Int32Array(buffer, byteOffset, length));
  const flags = Uint8Array.from(table.flags, (flag) => flag & ~table.bits.CRITICAL); // the critical path runs through one of them
  const columns = [...bits, table.kind, table.stage, table.micro_batch, flags];
  return Uint32Array.from({ length: table.lanes }, (_, lane) => {
    let first = table.isFailed[lane], second = 0;
    for (const column of columns) {
      for (let i = table.offsets[lane]; i < table.offsets[lane + 1]; i++) {
        first = Math.imul(first ^ column[i], 0x01000193);
        second = Math.imul(second ^ column[i], 0x85ebca6b) ^ (second >>> 13);
      }
    }
    const key = `${first} ${second} ${table.offsets[lane + 1] - table.offsets[lane]}`;
    if (!known.has(key)) known.set(key, lane);
    return known.get(key);
  });
}

export class Rows {
  constructor(table, grouping, folded, pinned = []) {
    this.isAlike = grouping === ALIKE;
    const major = this.isAlike ? alikeLanes(table) : grouping === "stage" ? table.ranks : table.pipelines;
    const minor = grouping === "stage" ? table.pipelines : table.ranks;
    this.grouping = grouping;
    this.folded = folded;
    this.title = this.isAlike ? "what they do" : grouping === "stage" ? table.by_rank : "pipeline";
    this.pinned = pinned.filter((lane) => lane < table.lanes);
    const others = Uint32Array.from({ length: table.lanes }, (_, lane) => lane).filter((lane) => !this.pinned.includes(lane));
    this.order = Uint32Array.from([...this.pinned, ...others.sort((a, b) => major[a] - major[b] || minor[a] - minor[b])]);
    const groupOf = (place) => (place < this.pinned.length ? PINNED : major[this.order[place]]);
    this.first = [];
    this.groups = [];
    for (let place = 0; place < table.lanes; ) {
      const key = groupOf(place);
      let end = place;
      while (end < table.lanes && groupOf(end) === key) end++;
      const top = this.first.length, isOpen = key === PINNED, shut = !isOpen && !this.isAlike && folded.has(key);
      for (let i = place; i < end; i += shut || (this.isAlike && !isOpen) ? end - place : 1) this.first.push(i);
      this.groups.push({ key, name: key === PINNED ? PINNED : `${this.title} ${key}`, top, bottom: this.first.length, shut, size: end - place });
      place = end;
    }
    this.count = this.first.length;
    this.first.push(table.lanes);
    this.hasGroups = !this.isAlike && this.groups.some((group) => group.size > 1) && this.groups.length > 1;
    this.rowOf = new Uint32Array(table.lanes);
    for (let row = 0; row < this.count; row++) {
      for (let i = this.first[row]; i < this.first[row + 1]; i++) this.rowOf[this.order[i]] = row;
    }
  }

  size(row) { return this.first[row + 1] - this.first[row]; }

  /* The lane of a row, the first of several that are alike; -1 for a folded group. */
  lane(row) {
    return row >= 0 && row < this.count && (this.isAlike || this.size(row) === 1) ? this.order[this.first[row]] : -1;
  }

  groupAt(row) { return this.groups.find((group) => row >= group.top && row < group.bottom); }
}
