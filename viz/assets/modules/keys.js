/* Keys and buttons of the current timeline, the search, and the list of keys. */
import { dock, useView } from "viz/dock.js";
import { save, shift, undoEdit } from "viz/edit.js";
import { remember } from "viz/link.js";
import { writeNote } from "viz/notes.js";
import { LAYERS, element, viewInUse } from "viz/page.js";
import { go } from "viz/player.js";
import { Rows, nextGrouping } from "viz/rows.js";
import { earliest, searchTable } from "viz/search.js";
import { switchTheme } from "viz/theme.js";
const TYPING = 150; // milliseconds after the last key until a search starts
const fast = (event) => (event.shiftKey ? 3 : 1);
const isWork = (view) => (i) => view.table.isWork[view.table.kind[i]];

function firstShown(view) {
  const { t0, y0 } = view.view, { table, rows } = view;
  for (let row = Math.max(0, Math.floor(y0)); row < rows.count; row++) {
    const lane = rows.lane(row), i = lane < 0 ? -1 : table.firstAfter(lane, t0);
    if (lane >= 0 && i < table.offsets[lane + 1]) return i;
  }
  return -1;
}

function step(view, dir) {
  const to = view.selected < 0 ? firstShown(view) : view.table.next(view.selected, dir, isWork(view));
  if (to >= 0) view.select(to);
}

/* Select the operation at about the same time in the next lane with operations. */
function lane(view, dir) {
  if (view.selected < 0) { step(view, 1); return; }
  const { table, rows } = view, t = table.start[view.selected];
  for (let row = rows.rowOf[table.laneOf(view.selected)] + dir; row >= 0 && row < rows.count; row += dir) {
    const other = rows.lane(row), all = other < 0 ? [] : table.operations(other).filter(isWork(view));
    if (!all.length) continue;
    view.select(all.find((i) => table.end[i] > t) ?? all.at(-1));
    return;
  }
}

/* Select the awaited input, or the first consumer. */
function chain(view, dir) {
  const { links, table: { start } } = view;
  const to = dir < 0 ? (links?.waited >= 0 ? links.waited : links?.inputs[0]) : links?.outputs.toSorted((a, b) => start[a] - start[b])[0];
  if (to !== undefined) view.select(to);
}

function bubble(view, dir) {
  const { table, gap, selected } = view, least = view.span * 1e-6;
  const lane_ = view.chosenLane >= 0 ? view.chosenLane : Math.max(0, view.rows.lane(Math.max(0, Math.floor(view.view.y0))));
  const t = gap ? (dir > 0 ? gap.to : gap.from) : selected >= 0 ? table.start[selected] : dir > 0 ? -1 : Infinity;
  const gaps = table.gaps(lane_).filter(([from, to]) => to - from > least);
  const next = dir > 0 ? gaps.find(([from]) => from >= t - least) : gaps.findLast(([, to]) => to <= t + least);
  if (next) view.selectGap(lane_, ...next); else view.announce(`no ${dir > 0 ? "later" : "earlier"} gap on worker ${table.labels[lane_]}`);
}

const worker = (view) => (view.chosenLane >= 0 ? view.sendLane(view.chosenLane) : view.announce("select an operation or a gap of the worker first"));

function violation(view) {
  const { table } = view;
  const broken = Array.from(table.flags.keys()).filter((i) => table.has(i, "VIOLATION")), next = broken.find((i) => i > view.selected) ?? broken[0];
  if (next === undefined) view.announce("no operation breaks a rule"); else view.select(next);
}

const far = (event) => (event.shiftKey ? "change" : "step");

function toggle(view, flag) {
  view[flag] = !view[flag];
  view.redraw();
  remember(view);
}

const KEYS = [
  ["w / s", "zoom in and out in time (Shift: three times)", { w: (v, e) => v.zoom(0.7 ** fast(e), v.pointer && v.pointer.t), s: (v, e) => v.zoom(0.7 ** -fast(e), v.pointer && v.pointer.t) }],
  ["a / d", "move to earlier and later", { a: (v, e) => v.pan(-0.15 * fast(e)), d: (v, e) => v.pan(0.15 * fast(e)) }],
  ["+ / -", "fewer and more lanes", { "+": (v) => v.zoomRows(0.7), "=": (v) => v.zoomRows(0.7), "-": (v) => v.zoomRows(1 / 0.7) }],
  [". / ,", "next and previous operation of the lane", { ".": (v) => step(v, 1), ",": (v) => step(v, -1) }],
  ["↑ / ↓", "the lane above and below", { ArrowUp: (v) => lane(v, -1), ArrowDown: (v) => lane(v, 1) }],
  ["[ / ]", "what the selection waited for, and its consumers", { "[": (v) => chain(v, -1), "]": (v) => chain(v, 1) }],
  ["b / B", "next and previous bubble of the lane", { b: (v, e) => bubble(v, e.shiftKey ? -1 : 1) }],
  ["f", "zoom to the selection, then out again", { f: (v) => v.focus() }],
  ["0", "everything", { 0: (v) => v.fit() }],
  ["z", "the previous window", { z: (v) => v.undo() }],
  ["< / >", "move the selection earlier or later in its worker's program (Alt + drag: to any place)", { "<": (v) => shift(v, -1), ">": (v) => shift(v, 1) }],
  ["Z", "undo the last such move", { Z: (v) => undoEdit(v) }],
  ["u", "the micro-batch of the selection on all workers", { u: (v) => v.follow() }],
  ["g", "lanes by pipeline, by stage, or those alike as one", { g: (v) => v.group() }],
  ["h", "fold or unfold all groups", { h: (v) => v.foldAll() }],
  ["k", "pin or unpin the selection's worker", { k: (v) => v.pin() }],
  ["p", "critical path", { p: (v) => toggle(v, "path") }],
  ["m", "memory of the selected worker", { m: (v) => toggle(v, "showsMemory") }],
  ["M", "memory of all workers in place of their work", { M: (v) => toggle(v, "showsHeld") }],
  ["t", "table of the operations in view, to read or copy", { t: (v) => toggle(v, "showsListing") }],
  ["x", "the selection's worker: in what-if, fail or restore it", { x: worker }],
  ["n", "write a note at the selection; links include it", { n: (v) => writeNote(v) }],
  ["PgUp / PgDn", "previous and next step of a run (Shift: change of workers or plan)", { PageUp: (v, e) => go(`${far(e)} before`), PageDown: (v, e) => go(`${far(e)} after`) }],
  ["Space", "play the steps of a run, or pause", { " ": () => go("play") }],
  ["r", "how the lanes and time shown are spent", { r: () => dock.open("view") }],
  ["e", "next operation that breaks a rule", { e: violation }],
  ["i / o", "close or open the panel; put it below or at the right", { i: () => dock.shut(), o: () => dock.turn() }],
  ["/", "search: kind:W mb:1.3 stage:2 dur>1.2", { "/": () => document.querySelector(".lanes-search").focus() }],
  ["Esc", "clear the selection", { Escape: (v) => v.clear() }],
  ["?", "this list", { "?": () => help() }],
];
const ACTIONS = Object.assign({}, ...KEYS.map(([, , actions]) => actions));
const MOUSE = [
  ["drag", "zoom into the box"], ["click", "select an operation or a gap"], ["double click", "everything"],
  ["Ctrl + wheel", "zoom in time"], ["Alt + wheel", "fewer and more lanes"], ["wheel", "scroll the lanes"], ["drag along the axis", "mark a range, measure it"], ["Shift + wheel", "move in time"],
  ["click on a group's name", "fold or unfold it"],
];

function help() {
  let dialog = document.querySelector("dialog.lanes-help");
  if (!dialog) {
    const close = element("button", { onclick: () => dialog.close() }, "Close");
    const lines = [...KEYS, ...MOUSE].flatMap(([keys, text]) => [element("dt", {}, keys), element("dd", {}, text)]);
    dialog = element("dialog", { className: "lanes-help" }, element("h2", {}, "Keys and mouse"), element("dl", {}, ...lines), close);
    document.body.append(dialog);
  }
  dialog.showModal();
}

document.addEventListener("keydown", (event) => {
  const view = viewInUse(), typing = event.target.closest?.("input, textarea, select, [contenteditable], dialog, [role=slider]");
  if (event.key === " " && event.target.closest?.("button, a, summary, [role=tab]")) return; // the key presses it
  if (typing || event.ctrlKey || event.metaKey || event.altKey || !view) return;
  const action = ACTIONS[event.key] || ACTIONS[event.key.toLowerCase()];
  if (!action) return;
  event.preventDefault();
  useView(view);
  action(view, event);
});

const BUTTONS = [
  ["group", "By stage", "g", (v) => v.group()], ["fold", "Fold groups", "h", (v) => v.foldAll()], ["path", "Critical path", "p", ACTIONS.p],
  ["memory", "Memory", "m", ACTIONS.m], ["held", "All memory", "M", ACTIONS.M], ["table", "Table", "t", ACTIONS.t],
  ["fit", "Fit", "0", (v) => v.fit()], ["undo", "Undo move", "Z", undoEdit], ["save", "Save schedule", "", save],
];

/* Add the buttons above a timeline, and once per page the search. */
export function addToolbar(view) {
  const tools = view.root.querySelector(".lanes-tools");
  tools.replaceChildren(...BUTTONS.map(([name, text, key, action]) => {
    const press = (event) => { useView(view); action(view, event); };
    const button = element("button", { type: "button", title: key && `key ${key}`, onclick: press }, text);
    button.dataset.action = name;
    return button;
  }));
  view.onDraw = () => {
    for (const name of ["undo", "save"]) tools.querySelector(`[data-action=${name}]`).hidden = !view.edits.length;
    for (const [name, flag] of LAYERS) tools.querySelector(`[data-action=${name}]`).setAttribute("aria-pressed", String(view[flag]));
  };
  view.onRows = () => { tools.querySelector("[data-action=group]").textContent = { pipeline: "By pipeline", stage: "By stage", alike: "Alike as one" }[nextGrouping(view.rows.grouping)]; };
  const grouped = view.rows.hasGroups || new Rows(view.table, "stage", new Set()).hasGroups;
  for (const name of ["group", "fold"]) tools.querySelector(`[data-action=${name}]`).hidden = !grouped;
  tools.querySelector("[data-action=path]").hidden = !view.table.flags.some((flags) => flags & view.table.bits.CRITICAL);
  search();
}

function search() {
  if (document.querySelector(".lanes-search")) return;
  const place = document.querySelector(".bar-tools") || document.querySelector(".top") || document.body;
  const field = element("input", {
    type: "search", className: "lanes-search", placeholder: "Search  kind:F mb:3", spellcheck: false, ariaLabel: "Search operations",
  });
  field.addEventListener("keydown", (event) => {
    const view = viewInUse();
    event.stopPropagation();
    if (!view) return;
    if (event.key === "Escape") { field.value = ""; find(view, ""); field.blur(); }
    if (event.key === "Enter" || event.key === "Escape") clearTimeout(field.waits);
    if (event.key === "Enter") find(view, field.value, event.shiftKey ? -1 : 1);
  });
  field.addEventListener("input", () => {
    clearTimeout(field.waits);
    field.waits = setTimeout(() => { if (viewInUse()) outline(viewInUse(), field.value); }, TYPING);
  });
  field.addEventListener("search", () => { if (!field.value && viewInUse()?.matches) find(viewInUse(), ""); }); // its cross, which fires late
  const named = (text, title, onclick) => element("button", { type: "button", title, ariaLabel: text.length > 1 ? text : title, onclick }, text);
  const keys = named("Keys", "key ?", () => help());
  const docked = document.querySelector(".bar-tools") ? [named("Panel", "key i; o puts it below or at the right", () => dock.shut())] : [];
  const copy = () => navigator.clipboard.writeText(location.href).then(() => viewInUse()?.announce("copied"), () => viewInUse()?.announce("The browser refuses to copy: copy the address."));
  const picture = () => { const view = viewInUse(); if (view) element("a", { href: view.canvas.toDataURL(), download: `${view.name}.png` }).click(); };
  place.append(field, keys, ...docked, named("◐", "Switch between light and dark", switchTheme), named("Link", "Copy a link to what the page shows", copy), named("⤓", "Save the lanes as a picture", picture));
}

/* The matches of a query, the first thousand outlined; null without a query. */
function outlined(view, query) {
  const matches = searchTable(view.table, query);
  view.matches = matches && matches.slice(0, 1000);
  view.redraw();
  return matches;
}

/* Outline matches while typing; an incomplete query is not an error. */
function outline(view, query) {
  let matches = null;
  try { matches = outlined(view, query); } catch { view.matches = null; view.redraw(); }
  view.announce(!matches ? "" : matches.length ? `${matches.length} found: Enter selects the next, Shift+Enter the previous` : `No match for ${query}`);
}

/* Select the next match. */
function find(view, query, dir = 1) {
  let matches;
  try { matches = outlined(view, query); } catch (error) { dock.listMatches(view, query, { problem: error.message }); return view.announce(error.message); }
  if (!matches) return view.announce("");
  if (!matches.length) {
    dock.listMatches(view, query, { operations: [], total: 0 });
    dock.open("found");
    return view.announce(`No match for ${query}`);
  }
  const place = matches.findIndex((i) => i > view.selected), next = dir > 0 ? place : (place < 0 ? matches.length : place) - (matches.includes(view.selected) ? 2 : 1);
  const chosen = ((next < 0 ? (dir > 0 ? 0 : matches.length - 1) : next) + matches.length) % matches.length;
  view.select(matches[chosen], true);
  if (!view.table.toServer) {
    dock.listMatches(view, query, { operations: earliest(view.table, matches, 40), total: matches.length });
    dock.open("found");
  }
  return view.announce(`${chosen + 1} of ${matches.length}: ${view.table.instruction(matches[chosen])}`);
}
