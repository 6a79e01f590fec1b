/* The pointer on a timeline: tooltips, selection, folding, zoom and scrolling. */
import { drawCursor, drawZoomBox } from "viz/axes.js";
import { dragged, dropped } from "viz/edit.js";
import { markRange } from "viz/flow.js";
import { element } from "viz/page.js";
import { heldAt } from "viz/strips.js";
const CLICK = 4, DOUBLE = 350, WHEEL = 0.0015, NAME = 7.5; // NAME: pixels of a character of a lane's name
const FLAT = 0.6, FLATTEST = 30; // a flatter box keeps the rows

export const pointerMethods = {
  /* The target of the pointer: {t, y, row, lane, operation, inside, ...}. */
  under(event) {
    const box = this.overlay.getBoundingClientRect(), { left, top, width, height } = this.place, { t0, t1, y0, y1 } = this.view;
    const px = event.clientX - box.left - left, py = event.clientY - box.top - top;
    const t = t0 + (px / width) * (t1 - t0), y = y0 + (py / height) * (y1 - y0), row = Math.floor(y);
    const inside = px >= 0 && px < width && py >= 0 && py < height, lane = this.rows.lane(row);
    const gutter = px < 0 && py >= 0 && py < height, above = py < 0 && px >= 0 && px < width;
    const operation = inside && lane >= 0 ? this.table.at(lane, t, y - row - 0.5) : -1;
    return { t, y, row, lane, operation, inside, gutter, above, px };
  },

  _hover(event) {
    const began = performance.now();
    const target = this.under(event);
    this.rests = event;
    this.pointer = target.inside ? target : null;
    if (event.buttons || !target.inside || target.row >= this.rows.count) this._hide();
    else this._tip(event, this.words(target));
    this.hovered = target.operation;
    drawCursor(this, target.inside ? target.t : null);
    this.hoverSeconds = (performance.now() - began) / 1000;
  },

  /* Lines of the tooltip for an operation, a gap, or a folded group. */
  words({ t, row, lane, operation }) {
    const held = lane >= 0 ? heldAt(this, lane, t) : [];
    if (operation >= 0) return [...this.table.describe(operation, lane), ...held];
    if (lane < 0) {
      const group = this.rows.groupAt(row);
      return group ? [group.name, `${group.size} workers, folded`] : [];
    }
    const { table } = this, gap = table.gapAt(lane, t), failed = table.isFailed[lane] ? "has failed" : "idle";
    const lines = [`worker ${table.labels[lane]}: ${failed}`];
    if (gap && !table.isFailed[lane]) lines.push(`from ${table.time(gap[0])} to ${table.time(gap[1])}, ${table.time(gap[1] - gap[0])}`);
    return [...lines, ...held];
  },

  _tip(event, lines) {
    const box = this.tip.parentElement.getBoundingClientRect();
    this.tip.replaceChildren(...lines.map((line, place) => element(place ? "div" : "b", {}, line)));
    this.tip.hidden = !lines.length;
    const left = event.clientX - box.left, right = left > box.width / 2;
    this.tip.style.left = right ? "" : `${left + 14}px`;
    this.tip.style.right = right ? `${box.width - left + 14}px` : "";
    this.tip.style.top = `${Math.max(0, event.clientY - box.top + 12)}px`;
  },

  /* Update the tooltip when lanes moved under a resting pointer. */
  _tipAgain() {
    const target = this.rests && !this.tip.hidden && this.under(this.rests);
    if (target?.inside && target.row < this.rows.count) this._tip(this.rests, this.words(target));
  },

  _hide() { this.tip.hidden = true; this.pointer = null; },

  _press(event) {
    const under = this.under(event);
    if (event.button) return;
    if (under.above) { markRange(this, event); return; }
    this.down = { x: event.clientX, y: event.clientY, under, view: this.view, moves: event.altKey && under.operation >= 0 };
    if (under.inside && !this.down.moves) this._left(this.view);
  },

  /* A drag over the lanes draws the zoom box; next to them it scrolls the rows. */
  _drag(event) {
    const { down } = this;
    if (!down || (!down.isDrag && Math.hypot(event.clientX - down.x, event.clientY - down.y) <= CLICK)) return;
    down.isDrag = true;
    this._hide();
    if (down.moves) dragged(this, down, this.under(event).t);
    else if (down.under.inside) drawZoomBox(this, this._boxed(event));
    else if (down.under.gutter) {
      const rows = ((down.y - event.clientY) / this.place.height) * (down.view.y1 - down.view.y0);
      this.show({ y0: down.view.y0 + rows, y1: down.view.y1 + rows });
    }
  },

  /* The window between the ends of a drag: whole rows, or all visible ones for a flat box. */
  _boxed(event) {
    const { down, view } = this, to = this.under(event), from = down.under;
    const wide = Math.abs(event.clientX - down.x), high = Math.abs(event.clientY - down.y), isFlat = high < Math.min(FLAT * wide, FLATTEST);
    const isNarrow = wide < Math.min(FLAT * high, FLATTEST), rowOf = (point) => Math.min(Math.max(point.y, view.y0), view.y1);
    const [t0, t1] = isNarrow ? [view.t0, view.t1] : [Math.min(from.t, to.t), Math.max(from.t, to.t)];
    const [y0, y1] = isFlat ? [view.y0, view.y1] : [Math.floor(Math.min(rowOf(from), rowOf(to))), Math.ceil(Math.max(rowOf(from), rowOf(to)))];
    return { t0: Math.max(t0, view.t0), t1: Math.min(t1, view.t1), y0, y1 };
  },

  _up(event) {
    const { down } = this;
    if (!down || event.button) return undefined;
    const box = down.isDrag && down.under.inside ? this._boxed(event) : null;
    this.down = null;
    drawZoomBox(this, null);
    if (down.moves && down.isDrag) return dropped(this, down, this.under(event).t);
    if (box) return this.show(box, false);
    if (down.isDrag) return undefined;
    const target = this.under(event), before = this.clicked;
    this.clicked = event;
    const again = before && event.timeStamp - before.timeStamp < DOUBLE
      && Math.hypot(event.clientX - before.clientX, event.clientY - before.clientY) <= CLICK;
    if (target.inside && again) return this.fit();
    if (target.gutter) return this._gutter(target);
    if (!target.inside) return undefined;
    if (target.operation >= 0) return this.select(target.operation);
    const gap = target.lane >= 0 && !this.table.isFailed[target.lane] && this.table.gapAt(target.lane, target.t);
    return gap ? this.selectGap(target.lane, ...gap) : this.clear();
  },

  /* A click next to the axes folds a group; on a lane's name, which ends 8 pixels before them, it selects the worker. */
  _gutter({ row, lane, px }) {
    const group = this.rows.groupAt(row), isName = lane >= 0 && px >= -(14 + NAME * this.table.labels[lane].length);
    if (group && this.rows.hasGroups && ((row === group.top && !isName) || lane < 0 || this.level === 0)) this.fold(group.key);
    else if (lane >= 0) this.sendLane(lane);
  },

  /* Ctrl: zoom time; Alt: zoom lanes; Shift: pan; otherwise: scroll the lanes, and at their end the page. */
  _wheel(event) {
    const { t, row } = this.under(event), delta = event.deltaY || event.deltaX, { y0, y1 } = this.view;
    const stop = () => { event.preventDefault(); event.stopPropagation(); };
    if (event.ctrlKey || event.metaKey) { stop(); return this.zoom(Math.exp(delta * WHEEL * 2), t); }
    if (event.altKey) { stop(); return this.zoomRows(Math.exp(delta * WHEEL * 2), row); }
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) { stop(); return this.pan(delta * WHEEL); }
    event.stopPropagation();
    if (delta < 0 ? y0 <= 0 : y1 >= this.rows.count) return undefined;
    stop();
    return this.panRows(((y1 - y0) * delta) / this.place.height);
  },
};
