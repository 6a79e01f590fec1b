/* Lanes of each row: pinned ones first, the others by pipeline or stage, a folded group as one row. Row r has lanes
   order[first[r]] to order[first[r + 1] - 1] and is drawn from y = r to y = r + 1. */

const PINNED = "pinned";

export class Rows {
  constructor(table, grouping, folded, pinned = []) {
    const major = grouping === "stage" ? table.ranks : table.pipelines;
    const minor = grouping === "stage" ? table.pipelines : table.ranks;
    this.grouping = grouping;
    this.folded = folded;
    this.title = grouping === "stage" ? table.by_rank : "pipeline";
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
      const top = this.first.length, shut = key !== PINNED && folded.has(key);
      for (let i = place; i < end; i += shut ? end - place : 1) this.first.push(i);
      this.groups.push({ key, name: key === PINNED ? PINNED : `${this.title} ${key}`, top, bottom: this.first.length, shut, size: end - place });
      place = end;
    }
    this.count = this.first.length;
    this.first.push(table.lanes);
    this.hasGroups = this.groups.some((group) => group.size > 1) && this.groups.length > 1;
    this.rowOf = new Uint32Array(table.lanes);
    for (let row = 0; row < this.count; row++) {
      for (let i = this.first[row]; i < this.first[row + 1]; i++) this.rowOf[this.order[i]] = row;
    }
  }

  /* The lane of a row; -1 for a folded group. */
  lane(row) {
    return row >= 0 && row < this.count && this.first[row + 1] - this.first[row] === 1 ? this.order[this.first[row]] : -1;
  }

  groupAt(row) { return this.groups.find((group) => row >= group.top && row < group.bottom); }
}
