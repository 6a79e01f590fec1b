/* The selection of a timeline: an operation, a gap, a worker, a range of time, or a micro-batch. It is scrolled to,
   announced, and sent to the server for details. */
import { dock } from "viz/dock.js";
import { flowOf } from "viz/flow.js";
import { remember } from "viz/link.js";
import { setProps, views } from "viz/page.js";
let told = null, telling; // what the server is told: the name of its timeline, and the selection
const SEND = 60, LATER = 250, READABLE = 14; // milliseconds until details are asked, after a change of lanes; pixels of a readable lane

export const selectionMethods = {
  /* Select an operation or a gap of a lane; -1 and null for neither. */
  _choose(lane, operation, gap) {
    Object.assign(this, { lane, selected: operation, gap, links: null, places: null });
    this.redraw();
  },

  sendLane(lane) {
    this._choose(lane, -1, null);
    dock.open(this.root.closest(".mode")?.dataset.named);
    this.announce(`worker ${this.table.labels[lane]}`);
    this._send({ lane });
  },

  /* `quietly`: keep the open panel; `reveals`: scroll to it. */
  select(operation, quietly = false, reveals = true) {
    if (this.flow && !this.flow.includes(operation)) this.flow = null;
    this._choose(this.table.laneOf(operation), operation, null);
    if (reveals) this._reveal(operation);
    this.announce(this.table.describe(operation, this.lane).join("; "));
    if (!quietly) dock.open("selection");
    this._send({ operation }, quietly ? LATER : SEND);
  },

  selectGap(lane, from, to, quietly = false) {
    this._choose(lane, -1, { lane, from, to });
    this.announce(`worker ${this.table.labels[lane]} idle from ${this.table.time(from)} to ${this.table.time(to)}`);
    if (!quietly) dock.open("selection");
    this._send(this.gap);
  },

  /* Mark a range of time, null for none; `isMoving` during a drag. */
  setRange(range, isMoving = false) {
    this.range = range;
    this.redraw();
    if (isMoving) return;
    this.announce(range ? `${this.table.time(range.t0)} to ${this.table.time(range.t1)}, ${this.table.time(range.t1 - range.t0)}` : "");
    if (range) dock.open("view");
    dock.tell();
    remember(this);
  },

  /* Show the selection's micro-batch on all workers, or everything again. */
  follow() {
    const { table } = this, result = this.flow ? [] : flowOf(table, this.selected), [first] = result;
    if (!this.flow && !result.length) { this.announce("Select an instruction of a micro-batch first."); return; }
    this.flow = result.length ? result : null;
    const last = result.reduce((late, i) => Math.max(late, table.end[i]), 0);
    this.announce(this.flow ? `Micro-batch ${table.home(first)}: ${result.length} instructions from ${table.time(table.start[first])} to ${table.time(last)}` : "");
    this.redraw();
  },

  /* Show only operations with a mark, all others pale; or everything again. */
  only(mark) {
    const marked = this.flow?.isLoose ? null : Array.from(this.table.flags.keys()).filter((i) => this.table.has(i, mark) && this.table.isWork[this.table.kind[i]]);
    this.flow = marked && Object.assign(marked, { isLoose: true });
    this.redraw();
  },

  setRibbons(data) { this.ribbons = data; this.redraw(); },

  clear() {
    this._choose(this.lane, -1, null);
    this.flow = this.range = null;
    this.announce("");
    this._send(null);
  },

  /* Select the operation or gap at a place. */
  selectPlace({ lane, from, to }) {
    const { table } = this, slack = 1e-5 * this.span, isThere = (i) => Math.abs(table.start[i] - from) <= slack && Math.abs(table.end[i] - to) <= slack;
    const operation = table.operations(lane).find(isThere);
    if (operation === undefined) this.selectGap(lane, from, to, true); else this.select(operation, true);
  },

  /* Scroll to an operation, and unfold its group. */
  _reveal(operation) {
    const { table } = this, lane = table.laneOf(operation), start = table.start[operation], end = table.end[operation];
    this._unfold(lane);
    const row = this.rows.rowOf[lane], { t0, t1, y0, y1 } = this.view, half = (t1 - t0) / 2, tall = y1 - y0;
    const want = {};
    if (end < t0 || start > t1) Object.assign(want, { t0: (start + end) / 2 - half, t1: (start + end) / 2 + half });
    if (row < y0 || row + 1 > y1) Object.assign(want, { y0: row + 0.5 - tall / 2, y1: row + 0.5 + tall / 2 });
    if (Object.keys(want).length) this.show(want);
  },

  _unfold(lane) {
    const group = this.rows.groupAt(this.rows.rowOf[lane]);
    if (group?.shut) this.fold(group.key);
  },

  /* Zoom to the selection; if it fills the window or nothing is selected, to everything. */
  focus() {
    const { table } = this, gap = this.gap;
    if (this.selected < 0 && !gap) return this.fit();
    const lane = this.chosenLane;
    const [from, to] = gap ? [gap.from, gap.to] : [table.start[this.selected], table.end[this.selected]];
    const row = this.rows.rowOf[lane], long = Math.max(to - from, this.span * 1e-5), { t0, t1 } = this.view;
    if (t1 - t0 <= long * 13) return this.fit();
    return this.show({ t0: from - 6 * long, t1: to + 6 * long, y0: row - 6, y1: row + 7 });
  },

  /* Frame places, and show them all in readable rows. */
  frame(places) {
    for (const { lane } of places) this._unfold(lane);
    const rows = places.map(({ lane }) => this.rows.rowOf[lane]), { y0, y1 } = this.view;
    const from = Math.min(...places.map((place) => place.from)), to = Math.max(...places.map((place) => place.to));
    const room = Math.max(to - from, 0.04 * this.span), top = Math.min(...rows), bottom = Math.max(...rows) + 1;
    const { height } = this.place, isReadable = height / (y1 - y0) >= READABLE, shown = isReadable && top >= y0 && bottom <= y1;
    const tall = Math.max(isReadable ? y1 - y0 : height / (2 * READABLE), bottom - top + 2), middle = (top + bottom) / 2;
    this.show({ t0: from - 2 * room, t1: to + 2 * room, ...(shown ? {} : { y0: middle - tall / 2, y1: middle + tall / 2 }) });
    this.places = places.length > 1 ? places : null;
    this.redraw();
  },

  /* Show and read out a line below the lanes. */
  announce(text) {
    this.status.textContent = text;
    remember(this);
  },

  _sendChosen() { if (this.chosenLane >= 0) this._send(this.gap || { operation: this.selected }); },

  _send(choice, wait = SEND) {
    const data = choice && (this.table.toServer ? this.table.toServer(choice) : { ...choice, address: this.root.dataset.address });
    if (!this.isInBench || (data && !this.root.isConnected)) return;
    clearTimeout(telling);
    told = choice && { name: this.name, choice };
    telling = setTimeout(() => setProps("bench-choice", { data: data && { ...data, name: this.name } }), wait);
  },

  /* Other lanes: the details of a worker follow; those of an instruction or gap that is not selected any more are removed. */
  _sendAgain() {
    if (told?.name !== this.name || this.chosenLane >= 0) return;
    const { operation, from } = told.choice;
    this._send(operation === undefined && from === undefined ? told.choice : null, LATER);
  },

  /* The timeline is gone; one in its place may send the same selection. */
  _clearDetails() { if (told?.name === this.name) this._send(null, LATER); },
};

/* The server's answer to a selection: operations for arrows. */
export function arrows(_, links) {
  if (!links) return null;
  for (const view of views.values()) {
    const result = view.table.fromServer ? view.table.fromServer(links) : view.root.dataset.address === links.address && links;
    if (!result) continue;
    if (view.selected >= 0 && view.selected === result.operation) view.links = result;
    view.redraw();
  }
  return links.operation === undefined ? null : links.operation;
}
