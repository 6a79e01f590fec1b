/* One timeline on the page: canvas below, Plotly's transparent axes above it. Plotly owns the ranges (zoom box, pan, mode
   bar); whatever moves them asks for one redraw in the next frame. Nothing here asks the server but for the table, once;
   the selection is written to a dcc.Store, from which the server makes the details. */
(function (recycle) {
  "use strict";
  const TOGETHER = 400, MOST_UNDONE = 100, CLICK = 4, DOUBLE = 350, WHEEL = 0.0015, SEND = 60, NAME = 7.5; // the last: pixels of a character of a lane's name
  recycle.views = new Map();
  recycle.element = (name, properties, ...children) => {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
  };
  recycle.lastOf = new Map(); // name -> what was shown last, for a timeline that takes another's place

  /* Make a timeline the one that keys, panels and the bar are about. */
  recycle.use = (view) => {
    recycle.active = view;
    view.used = true;
    recycle.dock?.tell();
  };

  class View {
    constructor(root, table, plot) {
      Object.assign(this, { root, table, plot });
      this.name = root.dataset.name;
      this.linked = root.dataset.linked;
      this.scale = Number(root.dataset.scale);
      this.span = Number(root.dataset.span) || table.span || 1;
      this.canvas = root.querySelector(".lanes-stage > canvas");
      this.context = this.canvas.getContext("2d", { willReadFrequently: true });
      this.tip = root.querySelector(".lanes-tip");
      this.status = root.querySelector(".lanes-status");
      this.selected = -1;
      this.gap = this.links = this.matches = this.memory = this.places = this.ghost = this.flow = this.range = null;
      this.before = []; // windows that were left, for undo
      this.path = this.showsMemory = this.showsHeld = this.showsListing = false;
      this.drawn = 0;
      this.level = -1;
      this.rows = new recycle.Rows(table, "pipeline", new Set());
      this.ended = new AbortController();
      this._theme();
      this._listen();
      recycle.toolbar(this);
      const before = recycle.views.get(this.name), active = recycle.active;
      before?.ended.abort();
      recycle.views.set(this.name, this);
      // Keys go to the first timeline of the page until another is used, in whatever order they are drawn, and to the one
      // in use again when it was drawn anew.
      const isInUse = active?.used && active !== before && active.root.isConnected;
      this.used = !isInUse && (recycle.left === this.name || Boolean(before?.used && active === before));
      if (this.used) recycle.active = this;
      else if (!isInUse) recycle.active = recycle.views.get(document.querySelector(".lanes-view[data-attached]").dataset.name);
      recycle.restore(this);
      this.redraw();
      recycle.dock.tell();
    }

    /* Time and rows that the axes show now. */
    get view() {
      const { x, y } = this.dragged || recycle.axes(this.plot);
      return { t0: x[0] / this.scale, t1: x[1] / this.scale, y0: y[1], y1: y[0] };
    }

    /* Time and rows that the next frame shows: keys may come faster than frames. */
    get goal() { return this.wanted || this.view; }

    get place() { return recycle.axes(this.plot).place; }

    get margin() { return 0.004 * this.span; }

    /* The window before the last change of it; changes that follow each other within `TOGETHER` are one. */
    undo() {
      const last = this.before.pop();
      if (last) this.show(last, false); else this.announce("Nothing was zoomed or moved before.");
    }

    _left(window_) {
      const now = performance.now(), isNew = !this.leftAt || now - this.leftAt > TOGETHER;
      this.leftAt = now;
      if (isNew) this.before = [...this.before, window_].slice(-MOST_UNDONE);
    }

    /* Show a window, cut to what there is; one relayout per frame however often it is asked. */
    show(window_, isNoted = true) {
      if (isNoted) this._left(this.goal);
      const now = this.goal, want = { ...now, ...window_ };
      [want.t0, want.t1] = within(want.t0, want.t1, -this.margin, this.span + this.margin, this.span * 1e-6);
      [want.y0, want.y1] = within(want.y0, want.y1, 0, this.rows.count, 1);
      const waiting = this.wanted;
      this.wanted = want;
      if (waiting) return;
      requestAnimationFrame(() => {
        const { t0, t1, y0, y1 } = this.wanted;
        this.wanted = null;
        if (!this.root.isConnected) return;
        window.Plotly.relayout(this.plot, { "xaxis.range": [t0 * this.scale, t1 * this.scale], "yaxis.range": [y1, y0] });
      });
    }

    /* Times of the ticks in view. */
    get ticks() {
      const { t0, t1 } = this.view, step = recycle.tickStep((t1 - t0) * this.scale, this.place.width) / this.scale;
      const first = Math.ceil(t0 / step);
      return Array.from({ length: Math.max(0, Math.floor(t1 / step) - first + 1) }, (_, place) => (first + place) * step);
    }

    fit() { this.show({ t0: -Infinity, t1: Infinity, y0: -Infinity, y1: Infinity }); }

    /* Zoom around a time (the middle when left out); around a row for the lanes. */
    zoom(factor, t = null) {
      const { t0, t1 } = this.goal, at = t === null ? (t0 + t1) / 2 : t;
      this.show({ t0: at - (at - t0) * factor, t1: at + (t1 - at) * factor });
    }

    zoomRows(factor, row = null) {
      const { y0, y1 } = this.goal, at = row === null ? (y0 + y1) / 2 : row;
      this.show({ y0: at - (at - y0) * factor, y1: at + (y1 - at) * factor });
    }

    pan(share) {
      const { t0, t1 } = this.goal;
      this.show({ t0: t0 + share * (t1 - t0), t1: t1 + share * (t1 - t0) });
    }

    panRows(rows) {
      const { y0, y1 } = this.goal;
      this.show({ y0: y0 + rows, y1: y1 + rows });
    }

    redraw() {
      if (this.asked) return;
      this.asked = true;
      requestAnimationFrame(() => {
        this.asked = false;
        if (this.root.isConnected && recycle.axes(this.plot)) this._draw();
      });
    }

    /* Other lanes of the same workers in place of these: what is shown, folded and selected stays as far as it can. */
    replace(table, address) {
      const { t0, t1 } = this.goal, whole = t0 <= 0 && t1 >= this.span, chosen = this.selected >= 0 && this.table.instruction(this.selected);
      const lane = chosen && this.table.laneOf(this.selected);
      Object.assign(this, { table, span: table.span || 1, selected: -1, gap: null, links: null, matches: null, memory: null, places: null, flow: null, range: null });
      this.root.dataset.address = address;
      this.rows = new recycle.Rows(table, this.rows.grouping, this.rows.folded);
      if (whole) this.show({ t0: -Infinity, t1: Infinity }); else this.show({});
      if (chosen) {
        for (let i = table.offsets[lane]; i < table.offsets[lane + 1]; i++) if (table.instruction(i) === chosen) { this.select(i, true); break; }
      }
      recycle.remember(this);
      this.redraw();
      recycle.dock.tell();
    }

    _draw() {
      const began = performance.now(), { graph: { width, height }, place: plot } = recycle.axes(this.plot);
      const ratio = window.devicePixelRatio || 1, canvas = this.canvas;
      const wide = Math.round(width * ratio), high = Math.round(height * ratio);
      if (canvas.width !== wide || canvas.height !== high) {
        canvas.width = wide;
        canvas.height = high;
        canvas.style.width = `${width}px`;
        canvas.style.height = `${height}px`;
      }
      this.theme.ticks = this.ticks;
      const picture = new recycle.Picture(this.table, this.rows, this.view, plot, ratio, this.theme);
      if (!this.raster || this.raster.width !== picture.width || this.raster.height !== picture.height) {
        this.raster = new recycle.Raster(picture.width, picture.height);
      }
      this.level = picture.draw(this.context, this.raster, this);
      recycle.layers(picture, this.context, this);
      recycle.memoryStrip(this, picture);
      recycle.minimap(this, picture);
      recycle.listing(this);
      this.onDraw();
      this._tipAgain();
      recycle.lastOf.set(this.name, { ...this.view, span: this.span, count: this.rows.count });
      this.seconds = (performance.now() - began) / 1000;
      this.drawn++;
      this.first = this.first || performance.now();
      this.root.dataset.drawn = this.drawn;
      this.root.dataset.level = this.level;
    }

    _theme() {
      const style = getComputedStyle(this.root), colour = (name) => style.getPropertyValue(name).trim(), { word } = recycle;
      // In the dark a failed lane must not be the brightest thing on the page.
      const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
      const failure = { ...this.table.failure, ...(isDark ? { fill: "#3B281D", hatch: "#6B4329" } : {}) }, words = (paint) => ({ fill: word(paint.fill), hatch: word(paint.hatch), ink: paint.ink });
      this.theme = {
        ink: colour("--ink"), muted: colour("--muted"), paper: colour("--card"), lane: colour("--lane"), memory: colour("--memory"), font: style.fontFamily,
        words: {
          lane: word(colour("--lane")), grid: word(colour("--grid")), rule: word(colour("--rule-strong")), held: word(colour("--memory")), border: word("#111111"),
        },
        paints: this.table.paints.map(words),
        chunks: this.table.chunk_paints ? this.table.chunk_paints.map((paints) => paints.map(words)) : null,
        failure: {
          fill: word(failure.fill), hatch: word(failure.hatch), line: word(failure.line), mark: failure.line, ink: failure.ink,
        },
      };
    }

    _listen() {
      const { signal } = this.ended, moved = () => { this.redraw(); this._follow(); recycle.remember(this); recycle.dock.tell(); };
      this.plot.on("plotly_relayouting", (changes) => { this.dragged = this._dragged(changes); moved(); });
      this.plot.on("plotly_relayout", (changes) => {
        this.dragged = null;
        moved();
        // A box that was drawn by hand cuts rows: whole ones are shown.
        if ("yaxis.range[0]" in changes && "xaxis.range[0]" in changes) this.show({ y0: Math.floor(this.view.y0), y1: Math.ceil(this.view.y1) }, false);
      });
      this.plot.on("plotly_afterplot", () => this.redraw());
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { this._theme(); this.redraw(); }, { signal });
      const stage = this.root.querySelector(".lanes-stage");
      const used = () => recycle.use(this);
      for (const event of ["pointerdown", "wheel", "focusin"]) this.root.addEventListener(event, used, { capture: true, passive: true });
      stage.addEventListener("pointermove", (event) => this._hover(event), true);
      stage.addEventListener("pointerleave", () => { this._hide(); recycle.cursor(this, null); });
      stage.addEventListener("wheel", (event) => this._wheel(event), { capture: true, passive: false });
      stage.addEventListener("pointerdown", (event) => {
        const under = this.under(event);
        if (under.above && !event.button) { event.stopPropagation(); recycle.markRange(this, event); return; }
        this.down = [event.clientX, event.clientY];
        this.downInside = under.inside;
        if (under.inside) this._left(this.goal);
      }, true);
      // Plotly would move the axis.
      stage.addEventListener("mousedown", (event) => { if (this.under(event).above) event.stopPropagation(); }, true);
      window.addEventListener("pointerup", (event) => this._up(event), { capture: true, signal });
    }

    /* The ranges in the middle of a drag, which Plotly writes into the layout when it ends; null while a zoom box is drawn,
       which moves nothing until then. */
    _dragged(changes) {
      if (this.downInside && this.plot.layout.dragmode === "zoom") return null;
      const { x, y } = recycle.axes(this.plot), of = (axis, range) => range.map((value, end) => changes[`${axis}.range[${end}]`] ?? value);
      return { x: of("xaxis", x), y: of("yaxis", y) };
    }

    /* What lies under the pointer: {t, row, lane, operation, inside}. */
    under(event) {
      const box = this.plot.getBoundingClientRect(), { left, top, width, height } = this.place, { t0, t1, y0, y1 } = this.view;
      const px = event.clientX - box.left - left, py = event.clientY - box.top - top;
      const t = t0 + (px / width) * (t1 - t0), y = y0 + (py / height) * (y1 - y0), row = Math.floor(y);
      const inside = px >= 0 && px < width && py >= 0 && py < height, lane = this.rows.lane(row);
      const gutter = px < 0 && py >= 0 && py < height, above = py < 0 && px >= 0 && px < width;
      const operation = inside && lane >= 0 ? this.table.at(lane, t, y - row - 0.5) : -1;
      return { t, row, lane, operation, inside, gutter, above, px };
    }

    _hover(event) {
      const began = performance.now();
      const found = this.under(event);
      this.rests = event;
      this.pointer = found.inside ? found : null;
      if (event.buttons || !found.inside || found.row >= this.rows.count) this._hide();
      else this._tip(event, this.words(found));
      this.hovered = found.operation;
      recycle.cursor(this, found.inside ? found.t : null);
      this.hoverSeconds = (performance.now() - began) / 1000;
    }

    /* Lines that tell what is there: an operation, a gap, or a folded group. */
    words({ t, row, lane, operation }) {
      if (operation >= 0) return this.table.describe(operation, lane);
      if (lane < 0) {
        const group = this.rows.groupAt(row);
        return group ? [`${this.rows.title} ${group.key}`, `${group.size} workers, folded`] : [];
      }
      const { table } = this, gap = table.gapAt(lane, t), failed = table.isFailed[lane] ? "has failed" : "idle";
      const lines = [`worker ${table.labels[lane]}: ${failed}`];
      if (gap && !table.isFailed[lane]) lines.push(`from ${table.time(gap[0])} to ${table.time(gap[1])}, ${table.time(gap[1] - gap[0])}`);
      return lines;
    }

    _tip(event, lines) {
      const box = this.tip.parentElement.getBoundingClientRect();
      this.tip.replaceChildren(...lines.map((line, place) => recycle.element(place ? "div" : "b", {}, line)));
      this.tip.hidden = !lines.length;
      const left = event.clientX - box.left, right = left > box.width / 2;
      this.tip.style.left = right ? "" : `${left + 14}px`;
      this.tip.style.right = right ? `${box.width - left + 14}px` : "";
      this.tip.style.top = `${Math.max(0, event.clientY - box.top + 12)}px`;
    }

    /* What lies under a pointer that rests, when lanes have moved below it. */
    _tipAgain() {
      if (this.rests && !this.tip.hidden) {
        const found = this.under(this.rests);
        if (found.inside && found.row < this.rows.count) this._tip(this.rests, this.words(found));
      }
    }

    _hide() { this.tip.hidden = true; this.pointer = null; }

    _up(event) {
      const down = this.down;
      this.down = null;
      if (!down || Math.hypot(event.clientX - down[0], event.clientY - down[1]) > CLICK || event.button) return;
      const found = this.under(event), before = this.clicked;
      this.clicked = event;
      const again = before && event.timeStamp - before.timeStamp < DOUBLE
        && Math.hypot(event.clientX - before.clientX, event.clientY - before.clientY) <= CLICK;
      if (found.inside && again) return this.fit();
      if (found.gutter) return this._gutter(found);
      if (!found.inside) return undefined;
      if (found.operation >= 0) return this.select(found.operation);
      const gap = found.lane >= 0 && !this.table.isFailed[found.lane] && this.table.gapAt(found.lane, found.t);
      return gap ? this.selectGap(found.lane, ...gap) : this.clear();
    }

    /* A click beside the axes folds a group; on a lane's own name, which ends 8 pixels before them, it is sent to the server. */
    _gutter({ row, lane, px }) {
      const group = this.rows.groupAt(row), isName = lane >= 0 && px >= -(14 + NAME * this.table.labels[lane].length);
      if (group && this.rows.hasGroups && ((row === group.top && !isName) || lane < 0 || this.level === 0)) return this.fold(group.key);
      if (lane >= 0) this.sendLane(lane);
      return undefined;
    }

    sendLane(lane) {
      Object.assign(this, { selected: -1, gap: null, links: null, places: null });
      recycle.dock.open(this.root.closest(".bench")?.dataset.named);
      this.redraw();
      this.announce(`worker ${this.table.labels[lane]}`);
      this._send({ lane });
    }

    /* Ctrl: zoom time; Alt: zoom lanes; Shift: pan; alone: scroll the lanes, and at their end the page. */
    _wheel(event) {
      const { t, row } = this.under(event), delta = event.deltaY || event.deltaX, { y0, y1 } = this.goal;
      const stop = () => { event.preventDefault(); event.stopPropagation(); };
      if (event.ctrlKey || event.metaKey) { stop(); return this.zoom(Math.exp(delta * WHEEL * 2), t); }
      if (event.altKey) { stop(); return this.zoomRows(Math.exp(delta * WHEEL * 2), row); }
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) { stop(); return this.pan(delta * WHEEL); }
      event.stopPropagation();
      if (delta < 0 ? y0 <= 0 : y1 >= this.rows.count) return undefined;
      stop();
      return this.panRows(((y1 - y0) * delta) / this.place.height);
    }

    /* `quietly`: the panel that is open stays. */
    select(operation, quietly = false) {
      this.selected = operation;
      if (this.flow && !this.flow.includes(operation)) this.flow = null;
      this.gap = this.links = this.places = null;
      this._reveal(operation);
      this.announce(this.table.describe(operation, this.table.laneOf(operation)).join("; "));
      this._tell({ operation }, quietly);
      this.redraw();
    }

    selectGap(lane, from, to, quietly = false) {
      this.selected = -1;
      this.links = this.places = null;
      this.gap = { lane, from, to };
      this.announce(`worker ${this.table.labels[lane]} idle from ${this.table.time(from)} to ${this.table.time(to)}`);
      this._tell({ lane, from, to }, quietly);
      this.redraw();
    }

    /* Mark a range of time, null for none; `isMoving` while its end is still dragged. */
    setRange(range, isMoving = false) {
      this.range = range;
      this.redraw();
      if (isMoving) return;
      this.announce(range ? `${this.table.time(range.t0)} to ${this.table.time(range.t1)}, ${this.table.time(range.t1 - range.t0)}` : "");
      if (range) recycle.dock.open("view");
      recycle.dock.tell();
      recycle.remember(this);
    }

    /* The micro-batch of the selection on all workers, or everything again. */
    follow() {
      if (this.flow) { this.flow = null; return this.redraw(); }
      const found = recycle.flowOf(this.table, this.selected);
      if (!found.length) return this.announce("Select an instruction of a micro-batch first.");
      this.flow = found;
      const { table } = this, first = found[0], last = found.reduce((late, i) => (table.end[i] > table.end[late] ? i : late), first);
      this.announce(`Micro-batch ${table.home(first)}: ${found.length} instructions from ${table.time(table.start[first])} to ${table.time(table.end[last])}`);
      return this.redraw();
    }

    clear() {
      this.selected = -1;
      this.gap = this.links = this.places = this.flow = this.range = null;
      this.announce("");
      this._send(null);
      this.redraw();
    }

    /* Selects the operation at a place, or the gap that it is. */
    selectPlace({ lane, from, to }) {
      const { table } = this, slack = 1e-5 * this.span;
      for (let i = table.offsets[lane]; i < table.offsets[lane + 1]; i++) {
        if (Math.abs(table.start[i] - from) <= slack && Math.abs(table.end[i] - to) <= slack) return this.select(i, true);
      }
      return this.selectGap(lane, from, to, true);
    }

    /* Scroll to an operation that is outside of what is shown; unfold its group. */
    _reveal(operation) {
      const { table } = this, lane = table.laneOf(operation), start = table.start[operation], end = table.end[operation];
      const group = this.rows.groupAt(this.rows.rowOf[lane]);
      if (group && group.shut) this.fold(group.key);
      const row = this.rows.rowOf[lane], { t0, t1, y0, y1 } = this.goal, half = (t1 - t0) / 2, tall = y1 - y0;
      const want = {};
      if (end < t0 || start > t1) Object.assign(want, { t0: (start + end) / 2 - half, t1: (start + end) / 2 + half });
      if (row < y0 || row + 1 > y1) Object.assign(want, { y0: row + 0.5 - tall / 2, y1: row + 0.5 + tall / 2 });
      if (Object.keys(want).length) this.show(want);
    }

    /* Zoom to the selection; where that is shown already, or nothing is selected, to everything. */
    focus() {
      const { table } = this, gap = this.gap;
      if (this.selected < 0 && !gap) return this.fit();
      const lane = gap ? gap.lane : table.laneOf(this.selected);
      const [from, to] = gap ? [gap.from, gap.to] : [table.start[this.selected], table.end[this.selected]];
      const row = this.rows.rowOf[lane], long = Math.max(to - from, this.span * 1e-5), { t0, t1 } = this.goal;
      if (t1 - t0 <= long * 13) return this.fit();
      return this.show({ t0: from - 6 * long, t1: to + 6 * long, y0: row - 6, y1: row + 7 });
    }

    /* Frame places and show them all: the rows that hold them, the time around them. */
    frame(places) {
      for (const { lane } of places) {
        const group = this.rows.groupAt(this.rows.rowOf[lane]);
        if (group && group.shut) this.fold(group.key);
      }
      const rows = places.map(({ lane }) => this.rows.rowOf[lane]), { y0, y1 } = this.goal;
      const from = Math.min(...places.map((place) => place.from)), to = Math.max(...places.map((place) => place.to));
      const room = Math.max(to - from, 0.04 * this.span), top = Math.min(...rows), bottom = Math.max(...rows) + 1;
      const tall = Math.max(y1 - y0, bottom - top + 2), middle = (top + bottom) / 2, shown = top >= y0 && bottom <= y1;
      this.show({ t0: from - 2 * room, t1: to + 2 * room, ...(shown ? {} : { y0: middle - tall / 2, y1: middle + tall / 2 }) });
      this.places = places.length > 1 ? places : null;
      this.redraw();
    }

    group() { this.setRows(this.rows.grouping === "stage" ? "pipeline" : "stage", new Set()); }

    fold(key) {
      const folded = new Set(this.rows.folded);
      if (!folded.delete(key)) folded.add(key);
      this.setRows(this.rows.grouping, folded);
    }

    foldAll() {
      const keys = this.rows.groups.map((group) => group.key);
      this.setRows(this.rows.grouping, new Set(this.rows.folded.size ? [] : keys));
    }

    /* Other rows: all of them are shown when all were; else the row at the top stays. Linked timelines of the same lanes go along. */
    setRows(grouping, folded, alone = false) {
      if (this.linked && !alone) for (const other of this._linked()) if (other.table.lanes === this.table.lanes) other.setRows(grouping, folded, true);
      const { y0, y1 } = this.goal, all = y0 <= 0 && y1 >= this.rows.count, top = this.rows.order[this.rows.first[Math.max(0, Math.floor(y0))]];
      this.rows = new recycle.Rows(this.table, grouping, folded);
      this.onRows();
      this.show(all ? { y0: 0, y1: this.rows.count } : { y0: this.rows.rowOf[top], y1: this.rows.rowOf[top] + (y1 - y0) });
      this.announce(`${this.rows.count} rows, by ${this.rows.title}`);
      recycle.remember(this);
      this.redraw();
    }

    /* A line below the lanes, read out. */
    announce(text) {
      this.status.textContent = text;
      recycle.remember(this);
    }

    /* Have the dock say more of a selection. */
    _tell(choice, quietly) {
      if (!quietly) recycle.dock.open("selection");
      this._send(choice);
    }

    _send(choice) {
      const data = choice && (this.table.toServer ? this.table.toServer(choice) : { ...choice, address: this.root.dataset.address });
      const page = this.root.closest(".bench")?.dataset.page;
      clearTimeout(this.sending);
      this.sending = setTimeout(() => {
        if (page && this.root.isConnected) window.dash_clientside.set_props({ type: "bench-choice", page }, { data: data && { ...data, name: this.name } });
      }, SEND);
    }

    _linked() {
      return [...recycle.views.values()].filter((other) => other !== this && other.linked === this.linked && other.root.isConnected);
    }

    /* Timelines that share a time axis move together; those with the same rows scroll together as well. */
    _follow() {
      if (!this.linked) return;
      const { t0, t1, y0, y1 } = this.view, near = (a, b, long) => Math.abs(a - b) <= long * 1e-6;
      for (const other of this._linked()) {
        if (other.wanted) continue;
        const theirs = other.view, rows = other.rows.count === this.rows.count ? { y0, y1 } : {};
        const same = near(theirs.t0, t0, t1 - t0) && near(theirs.t1, t1, t1 - t0);
        if (!same || (rows.y1 && !(near(theirs.y0, y0, y1 - y0) && near(theirs.y1, y1, y1 - y0)))) other.show({ t0, t1, ...rows });
      }
    }
  }

  /* [low, high] moved and cut into [least, most], at least `short` long. */
  function within(low, high, least, most, short) {
    const long = Math.min(Math.max(high - low || short, short), most - least);
    const begin = Math.min(Math.max(Number.isFinite(low) ? low : least, least), most - long);
    return [begin, begin + long];
  }

  function attach(root) {
    root.dataset.attached = "yes";
    if (!root.querySelector(".lanes-stage > canvas").getContext("2d", { willReadFrequently: true })) {
      root.querySelector(".lanes-status").textContent = "This browser has no canvas: the timeline is shown whole, without zoom.";
      return;
    }
    const failed = (error) => {
      root.dataset.failed = "yes";
      root.querySelector(".lanes-status").textContent = `The timeline could not be loaded (${error.message}). Load the page again.`;
    };
    const ready = new Promise((done) => {
      const look = () => {
        const plot = root.querySelector(".js-plotly-plot"), axes = plot && plot.on && recycle.axes(plot);
        if (axes && axes.place.width > 0) done(plot);
        else if (root.isConnected) requestAnimationFrame(look);
      };
      look();
    });
    Promise.all([recycle.tableOf(root), ready]).then(([table, plot]) => {
      const view = new View(root, table, plot);
      if (root.dataset.ghost) recycle.table(root.dataset.ghost).then((old) => { view.ghost = old; view.redraw(); }, () => {});
    }).catch(failed);
  }

  /* Dash puts timelines on the page at any time, and takes them away again. */
  let looking = false;
  new MutationObserver(() => {
    if (looking) return;
    looking = true;
    requestAnimationFrame(() => {
      looking = false;
      document.querySelectorAll(".lanes-view:not([data-attached])").forEach(attach);
      for (const [name, view] of recycle.views) {
        if (view.root.isConnected) continue;
        view.ended.abort();
        recycle.views.delete(name);
      }
      if (recycle.active && !recycle.active.root.isConnected) {
        recycle.left = recycle.active.used ? recycle.active.name : null;
        recycle.active = recycle.views.values().next().value;
      }
    });
  }).observe(document.documentElement, { childList: true, subtree: true });

  recycle.View = View;
})(window.recycle = window.recycle || {});
