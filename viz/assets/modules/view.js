/* One timeline: canvas, axes, and the visible window. Changes request one redraw in the next frame. The server is asked only
   for the table; the selection goes to a dcc.Store. */
import { drawCursor, drawTicks, tickStep } from "viz/axes.js";
import { tableOf } from "viz/derived.js";
import { dock, useView } from "viz/dock.js";
import { Picture } from "viz/draw.js";
import { addToolbar } from "viz/keys.js";
import { drawLayers } from "viz/layers.js";
import { remember, restore } from "viz/link.js";
import { showListing } from "viz/listing.js";
import { drawMinimap } from "viz/minimap.js";
import { modes } from "viz/modes.js";
import { lastShown, sizeCanvas, state, views, whenChanged } from "viz/page.js";
import { pointerMethods } from "viz/pointer.js";
import { Raster, colourWord } from "viz/raster.js";
import { Rows, nextGrouping } from "viz/rows.js";
import { addressUnder, apply, fitSpans, version } from "viz/scenario.js";
import { selectionMethods } from "viz/selection.js";
import { drawDeltas, drawMemory } from "viz/strips.js";
import { fetchTable } from "viz/table.js";
import { isDark, onTheme } from "viz/theme.js";
const TOGETHER = 400, MAX_UNDONE = 100;

export class View {
  constructor(root, table) {
    Object.assign(this, { root, table, overlay: root.querySelector(".lanes-axes") });
    this.size = this.overlay.getBoundingClientRect(); // later kept by an observer, because reading it forces a layout
    this.name = root.dataset.name;
    this.linked = root.dataset.linked;
    this.page = root.closest(".mode")?.dataset.page;
    this.isInBench = root.closest(".bench") !== null;
    this.scale = Number(root.dataset.scale);
    table.unit = [this.scale, root.dataset.word]; // all texts use the unit of the axis
    this.margins = root.dataset.margins.split(" ").map(Number);
    this.span = Number(root.dataset.span) || table.span || 1;
    this.canvas = root.querySelector(".lanes-stage > canvas");
    this.context = this.canvas.getContext("2d", { willReadFrequently: true });
    this.tip = root.querySelector(".lanes-tip");
    this.status = root.querySelector(".lanes-status");
    this.selected = this.lane = -1; // lane: of the last selection
    this.gap = this.links = this.matches = this.held = this.places = this.ghost = this.flow = this.range = this.ribbons = null;
    this.notes = [];
    this.before = []; // previous windows, for undo
    this.edits = []; // addresses of the lanes before each edit
    this.path = this.showsMemory = this.showsHeld = this.showsListing = false;
    this.drawn = 0;
    this.level = -1;
    this.rows = new Rows(table, "pipeline", new Set());
    this.view = { t0: -this.margin, t1: this.span + this.margin, y0: 0, y1: this.rows.count };
    this.ended = new AbortController();
    this._theme();
    this._listen();
    addToolbar(this);
    const before = views.get(this.name), active = state.active;
    before?.ended.abort();
    views.set(this.name, this);
    // The current timeline is the first of the page until another is used; a redrawn timeline stays current.
    const isInUse = active?.used && active !== before && active.root.isConnected;
    this.used = !isInUse && (state.left === this.name || Boolean(before?.used && active === before));
    if (this.used) state.active = this;
    else if (!isInUse) state.active = views.get(document.querySelector(".lanes-view[data-attached]").dataset.name);
    fitSpans([this]);
    restore(this);
    modes.carry(this);
    if (state.active?.used && this.linkedViews.includes(state.active)) state.active._follow();
    this.redraw();
    dock.tell();
  }

  /* Place of the axes in pixels. */
  get place() {
    const { width, height } = this.size, [left, top, right, bottom] = this.margins;
    return { left, top, width: width - left - right, height: height - top - bottom };
  }

  get isInSight() { return this.root.isConnected && this.place.width > 0; }

  get margin() { return 0.004 * this.span; }

  /* Lane of the selection or gap; -1 without one. */
  get chosenLane() { return this.gap ? this.gap.lane : this.selected >= 0 ? this.table.laneOf(this.selected) : -1; }

  /* Restore the window before the last change; changes within `TOGETHER` milliseconds count as one. */
  undo() {
    const last = this.before.pop();
    if (last) this.show(last, false); else this.announce("There is nothing to undo.");
  }

  _left(window_) {
    const now = performance.now(), isNew = !this.leftAt || now - this.leftAt > TOGETHER;
    this.leftAt = now;
    if (isNew) this.before = [...this.before, window_].slice(-MAX_UNDONE);
  }

  /* Show a window, clipped to the timeline; `isNoted`: for undo, `leads`: linked timelines follow. */
  show(window_, isNoted = true, leads = true) {
    if (isNoted) this._left(this.view);
    const want = { ...this.view, ...window_ };
    [want.t0, want.t1] = within(want.t0, want.t1, -this.margin, this.span + this.margin, this.span * 1e-6);
    [want.y0, want.y1] = within(want.y0, want.y1, 0, this.rows.count, 1);
    this.view = want;
    this.redraw();
    if (leads) this._follow();
    remember(this);
    dock.tell();
  }

  /* Distance of the ticks, in the unit of the axis. */
  get tickStep() { return tickStep((this.view.t1 - this.view.t0) * this.scale, this.place.width); }

  get ticks() {
    const { t0, t1 } = this.view, step = this.tickStep / this.scale, first = Math.ceil(t0 / step);
    return Array.from({ length: Math.max(0, Math.floor(t1 / step) - first + 1) }, (_, place) => (first + place) * step);
  }

  fit() { this.show({ t0: -Infinity, t1: Infinity, y0: -Infinity, y1: Infinity }); }

  /* Zoom times or rows around a place, or the middle, and move by a share of the window. */
  zoom(factor, t = null) { this._zoomed("t0", "t1", factor, t); }
  zoomRows(factor, row = null) { this._zoomed("y0", "y1", factor, row); }

  _zoomed(first, last, factor, place, share = 0) {
    const { [first]: low, [last]: high } = this.view, at = place ?? (low + high) / 2, by = share * (high - low);
    this.show({ [first]: at - (at - low) * factor + by, [last]: at + (high - at) * factor + by });
  }

  pan(share) { this._zoomed("t0", "t1", 1, null, share); }
  panRows(rows) { this._zoomed("y0", "y1", 1, null, rows / (this.view.y1 - this.view.y0)); }

  /* Timelines that are scrolled out of sight are drawn when they come back. */
  redraw() {
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => {
      this.asked = false;
      this.isStale = this.isInSight && this.isScrolledOut && this.drawn > 0 && state.active !== this;
      if (this.isInSight && !this.isStale) this._draw();
    });
  }

  /* Replace the lanes by others of the same workers; window, folding and selection stay as far as possible. */
  replace(table, address) {
    const { t0, t1 } = this.view, whole = t0 <= 0 && t1 >= this.span, chosen = this.selected >= 0 && this.table.instruction(this.selected);
    const lane = chosen && this.table.laneOf(this.selected);
    table.unit = this.table.unit;
    Object.assign(this, { table, span: table.span || 1, selected: -1, gap: null, links: null, matches: null, places: null, flow: null, range: null, ribbons: null });
    this.root.dataset.address = address;
    this.rows = new Rows(table, this.rows.grouping, this.rows.folded, this.rows.pinned);
    this.show(whole ? { t0: -Infinity, t1: Infinity } : {}, true, false);
    const same = chosen ? table.operations(lane).find((i) => table.instruction(i) === chosen) : undefined;
    if (same !== undefined) this.select(same, true); else this._sendAgain();
    remember(this);
    this.redraw();
    dock.tell();
  }

  /* Outline the lanes of `data-ghost`. */
  async outlineBefore() {
    const { ghost, timed } = this.root.dataset, asked = version();
    const table = ghost ? await addressUnder(ghost, timed).then(fetchTable).catch(() => null) : null;
    if (!table || asked !== version()) return;
    this.ghost = table;
    this.redraw();
  }

  _draw() {
    const began = performance.now(), { width, height } = this.size, plot = this.place;
    const ratio = window.devicePixelRatio || 1;
    sizeCanvas(this.canvas, width, height, ratio);
    this.theme.ticks = this.ticks;
    const picture = new Picture(this.table, this.rows, this.view, plot, ratio, this.theme);
    if (!this.raster || this.raster.width !== picture.width || this.raster.height !== picture.height) {
      this.raster = new Raster(picture.width, picture.height);
    }
    this.level = picture.draw(this.context, this.raster, this);
    drawLayers(picture, this.context, this);
    for (const draw of [drawTicks, drawMemory, drawDeltas, drawMinimap, showListing]) draw(this, picture);
    this.onDraw();
    this._tipAgain();
    lastShown.set(this.name, { ...this.view, span: this.span, count: this.rows.count });
    this.seconds = (performance.now() - began) / 1000;
    Object.assign(this.root.dataset, { drawn: ++this.drawn, level: this.level });
  }

  _theme() { this.theme = themeOf(this.root, this.table); }

  _listen() {
    const { signal } = this.ended, stage = this.root.querySelector(".lanes-stage");
    const resized = new ResizeObserver(([{ borderBoxSize: [{ inlineSize, blockSize }] }]) => {
      this.size = { width: inlineSize, height: blockSize };
      this.redraw();
    });
    const scrolled = new IntersectionObserver(([{ isIntersecting }]) => {
      this.isScrolledOut = !isIntersecting;
      if (isIntersecting && this.isStale) this.redraw();
    }, { rootMargin: "50px" });
    resized.observe(this.overlay);
    scrolled.observe(this.overlay);
    signal.addEventListener("abort", () => { resized.disconnect(); scrolled.disconnect(); });
    onTheme(() => { this._theme(); this.redraw(); }, signal);
    const used = () => useView(this);
    for (const event of ["pointerdown", "wheel", "focusin"]) this.root.addEventListener(event, used, { capture: true, passive: true, signal });
    stage.addEventListener("pointermove", (event) => this._hover(event), { capture: true, signal });
    stage.addEventListener("pointerleave", () => { this._hide(); drawCursor(this, null); }, { signal });
    stage.addEventListener("wheel", (event) => this._wheel(event), { capture: true, passive: false, signal });
    stage.addEventListener("pointerdown", (event) => this._press(event), { capture: true, signal });
    window.addEventListener("pointermove", (event) => this._drag(event), { capture: true, signal });
    window.addEventListener("pointerup", (event) => this._up(event), { capture: true, signal });
  }

  group() { this.setRows(nextGrouping(this.rows.grouping), new Set()); }

  fold(key) {
    const folded = new Set(this.rows.folded);
    if (!folded.delete(key)) folded.add(key);
    this.setRows(this.rows.grouping, folded);
  }

  /* Pin the selection's lane to the top, or unpin it. */
  pin() {
    const lane = this.chosenLane, { pinned } = this.rows;
    if (lane < 0) { this.announce("Select an instruction or a gap of the worker first."); return; }
    this.setRows(this.rows.grouping, this.rows.folded, false, pinned.includes(lane) ? pinned.filter((other) => other !== lane) : [...pinned, lane]);
    this.show({ y0: 0, y1: this.view.y1 - this.view.y0 });
    this.announce(`${this.rows.pinned.length} on top: ${this.rows.pinned.map((other) => this.table.labels[other]).join(", ")}`);
  }

  foldAll() {
    const keys = this.rows.groups.map((group) => group.key);
    this.setRows(this.rows.grouping, new Set(this.rows.folded.size ? [] : keys));
  }

  /* Change the rows, also of linked timelines with the same lanes. All rows stay visible, or the top row stays. */
  setRows(grouping, folded, alone = false, pinned = this.rows.pinned) {
    if (!alone) for (const other of this.linkedViews) if (other.table.lanes === this.table.lanes) other.setRows(grouping, folded, true, pinned);
    const { y0, y1 } = this.view, all = y0 <= 0 && y1 >= this.rows.count, top = this.rows.order[this.rows.first[Math.max(0, Math.floor(y0))]];
    this.rows = new Rows(this.table, grouping, folded, pinned);
    this.onRows();
    this.show(all ? { y0: 0, y1: this.rows.count } : { y0: this.rows.rowOf[top], y1: this.rows.rowOf[top] + (y1 - y0) }, true, !alone);
    this.announce(`${this.rows.count} rows, by ${this.rows.title}`);
    remember(this);
    this.redraw();
  }

  get linkedViews() {
    return this.linked ? [...views.values()].filter((other) => other !== this && other.linked === this.linked && other.root.isConnected) : [];
  }

  /* Linked timelines move together; those with the same rows also scroll together. */
  _follow() {
    const { t0, t1, y0, y1 } = this.view;
    for (const other of this.linkedViews) other.show({ t0, t1, ...(other.rows.count === this.rows.count ? { y0, y1 } : {}) }, true, false);
  }
}

/* [low, high] moved and clipped into [least, most], at least `short` long. */
function within(low, high, least, most, short) {
  const long = Math.min(Math.max(high - low || short, short), most - least);
  const begin = Math.min(Math.max(Number.isFinite(low) ? low : least, least), most - long);
  return [begin, begin + long];
}

/* Colours and fonts of a table on a page; in the dark a failed lane must not be the brightest part. */
export function themeOf(root, table) {
  const style = getComputedStyle(root), colour = (name) => style.getPropertyValue(name).trim();
  const failure = { ...table.failure, ...(isDark() ? { fill: "#3B281D", hatch: "#6B4329" } : {}) }, words = (paint) => ({ fill: colourWord(paint.fill), hatch: colourWord(paint.hatch), ink: paint.ink });
  return {
    ink: colour("--ink"), muted: colour("--muted"), paper: colour("--card"), lane: colour("--lane"), memory: colour("--memory"), font: style.fontFamily,
    words: {
      lane: colourWord(colour("--lane")), grid: colourWord(colour("--grid")), rule: colourWord(colour("--rule-strong")), held: colourWord(colour("--memory")), border: colourWord("#111111"),
    },
    paints: table.paints.map(words),
    chunks: table.chunk_paints ? table.chunk_paints.map((paints) => paints.map(words)) : null,
    failure: { fill: colourWord(failure.fill), hatch: colourWord(failure.hatch), line: colourWord(failure.line), mark: failure.line, ink: failure.ink },
  };
}

Object.assign(View.prototype, pointerMethods, selectionMethods);

/* Attach views that appear in the page, and forget those that are gone. */
async function attach(root) {
  const { dataset } = root, given = dataset.address, overlay = root.querySelector(".lanes-axes"), asked = version();
  dataset.attached = "yes";
  try {
    const address = await addressUnder(given, dataset.timed);
    if (address !== given) Object.assign(dataset, { original: given, address, span: "" });
    const table = await tableOf(root);
    while (!overlay.getBoundingClientRect().width) await new Promise(root.isConnected ? requestAnimationFrame : () => {}); // hidden
    const view = new View(root, table);
    if (asked === version()) await view.outlineBefore(); else await apply();
  } catch (error) {
    dataset.failed = "yes";
    root.querySelector(".lanes-status").textContent = `The timeline could not be loaded (${error.message}). Reload the page.`;
  }
}

export function attachAll() {
  document.querySelectorAll(".lanes-view:not([data-attached])").forEach(attach);
  for (const [name, view] of views) {
    if (view.root.isConnected) continue;
    view.ended.abort();
    view._clearDetails();
    views.delete(name);
  }
  if (state.active && !state.active.root.isConnected) {
    state.left = state.active.used ? state.active.name : null;
    state.active = views.values().next().value;
  }
}
whenChanged(attachAll);
