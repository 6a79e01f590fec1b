/* The address keeps view, window, rows, selection and layers. A selection is a step of the browser's history. An address of
   other lanes (another `plan`) restores only the window. */
import { notesAsText, notesOf } from "viz/notes.js";
import { LAYERS, inSight, lastShown, readAddress, state, viewInUse, views, writeAddress } from "viz/page.js";
const WAIT = 300;
let timer = null, write = null; // what is to be written to the address

/* The name of the lanes in the address; for embedded lanes their last bytes, a checksum. */
const digest = (view) => {
  const address = view.root.dataset.original || view.root.dataset.address;
  return address.startsWith("data:") ? address.slice(-12) : address.replace(/^.*\/|\.bin$/g, "").slice(0, 12);
};
const short = (value) => String(+value.toPrecision(9));

export function remember(view) {
  if (state.active !== view || !view.used) return;
  clearTimeout(timer);
  timer = setTimeout(writeNow, WAIT);
  write = () => {
    if (!view.root.isConnected || !view.isInSight) return;
    const { t0, t1, y0, y1 } = view.view, query = readAddress();
    const words = {
      view: view.name, plan: digest(view), t0: short(t0), t1: short(t1), lanes: `${short(y0)}-${short(y1)}`,
      group: view.rows.grouping, fold: [...view.rows.folded].join("."), sel: view.selected >= 0 ? view.selected : "",
      gap: view.gap ? [view.gap.lane, short(view.gap.from), short(view.gap.to)].join("_") : "",
      pins: view.rows.pinned.join("."), range: view.range ? [short(view.range.t0), short(view.range.t1)].join("_") : "",
      shows: LAYERS.filter(([, flag]) => view[flag]).map(([name]) => name).join("."),
      notes: notesAsText(view),
    };
    const chosen = (from) => `${from.get("view")} ${from.get("sel") || ""} ${from.get("gap") || ""}`, before = chosen(query);
    for (const [name, value] of Object.entries(words)) {
      if (value === "") query.delete(name); else query.set(name, value);
    }
    const isStep = (words.sel !== "" || words.gap) && chosen(query) !== before && !view.isCarried;
    view.isCarried = false;
    writeAddress(query, isStep);
  };
}

export function writeNow() {
  write?.();
  write = null;
}

export function restore(view) {
  writeNow(); // of another timeline that was used while this one was fetched
  const query = readAddress(), lanes = /^([\d.e+-]+?)-([\d.e+]+)$/.exec(query.get("lanes") || "");
  const before = lastShown.get(view.name);
  if (query.get("view") !== view.name) {
    if (before && before.span === view.span) view.show({ t0: before.t0, t1: before.t1, ...(before.count === view.rows.count ? { y0: before.y0, y1: before.y1 } : {}) }, true, false);
    return;
  }
  if (view.page === "validate" && before && query.get("plan") !== digest(view)) return; // another file was dropped
  const number = (name) => (query.get(name) ? Number(query.get(name)) : NaN), same = query.get("plan") === digest(view);
  const integers = (name) => (query.get(name) || "").split(".").filter(Boolean).map(Number).filter(Number.isInteger);
  const folded = new Set(integers("fold")), pinned = integers("pins");
  const group = ["stage", "alike"].find((each) => each === query.get("group")) || "pipeline";
  if (group !== "pipeline" || folded.size || pinned.length) view.setRows(group, folded, false, pinned);
  const [t0, t1] = [number("t0"), number("t1")], window_ = {};
  if (t1 > t0) Object.assign(window_, { t0, t1 });
  if (lanes && Number(lanes[2]) > Number(lanes[1])) Object.assign(window_, { y0: Number(lanes[1]), y1: Number(lanes[2]) });
  if (Object.keys(window_).length) view.show(window_);
  const shown = (query.get("shows") || "").split(".");
  for (const [name, flag] of LAYERS) view[flag] = shown.includes(name);
  if (same) view.notes = notesOf(view, query.get("notes"));
  mark(view, query, number("sel"), same);
  state.active = view;
  view.used = true; // otherwise a view that is attached later becomes the current one
}

const numbers = (text) => (text || "").split("_").map(Number);

/* Restore the selection, gap and range of an address with the same lanes. */
function mark(view, query, selected, same) {
  const [lane, from, to] = numbers(query.get("gap")), [t0, t1] = numbers(query.get("range"));
  if (t1 > t0) view.range = { t0, t1 };
  const isNamed = query.get("sel") !== null || query.get("gap") !== null;
  if (isNamed && query.get("plan") !== null && !same) {
    view.announce("The link was made for different lanes: its selection is ignored.");
  } else if (same && Number.isInteger(selected) && selected >= 0 && selected < view.table.length) {
    if (view.selected !== selected) view.select(selected, true, false);
  } else if (same && Number.isInteger(lane) && lane >= 0 && lane < view.table.lanes && to > from) {
    view.selectGap(lane, from, to, true);
  }
}

window.addEventListener("popstate", () => {
  const query = readAddress(), named = views.get(query.get("view")), view = inSight(named?.root) ? named : viewInUse();
  if (!view) return;
  write = null;
  if (query.get("sel") === null && query.get("gap") === null) view.clear();
  if (query.get("view") === view.name) restore(view);
  view.redraw();
});
