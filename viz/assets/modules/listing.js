/* The operations in view as a table to read or copy: by lane, then start, the first MAX_LISTED. */
import { element } from "viz/page.js";
const MAX_LISTED = 200, WAIT = 200;
const HEAD = ["Worker", "Instruction", "Kind", "Stage", "Start", "End", "Takes", "Marks"];

/* {rows: the first `most` operations in view, total: their number}. */
export function listed(view, most = MAX_LISTED) {
  const { table, rows } = view, { t0, t1, y0, y1 } = view.view, chosen = [];
  let total = 0;
  for (let row = Math.max(0, Math.floor(y0)); row < Math.min(rows.count, Math.ceil(y1)); row++) {
    for (let place = rows.first[row]; place < rows.first[row + 1]; place++) {
      const lane = rows.order[place], from = table.firstAfter(lane, t0), until = table.beganBefore(lane, t1);
      for (let i = from; i < until; i++) {
        if (chosen.length >= most) { total += until - i; break; }
        if (table.end[i] > t0) { chosen.push([i, lane]); total++; }
      }
    }
  }
  return { rows: chosen.map(([i, lane]) => cells(table, i, lane)), total };
}

function cells(table, i, lane) {
  const marks = Object.entries(table.marks).filter(([flag]) => table.has(i, flag)).map(([, text]) => text);
  return [
    table.labels[lane], table.instruction(i), table.kinds[table.kind[i]].title, String(table.stage[i]),
    ...[table.start[i], table.end[i], table.end[i] - table.start[i]].map((time) => table.time(time)), marks.join(", "),
  ];
}

const line = (name, words, first) => element("tr", {}, ...words.map((word, place) => (
  place === first ? element("th", { scope: "row" }, word) : element(name, name === "th" ? { scope: "col" } : {}, word))));

function fill(view) {
  const place = view.root.querySelector(".lanes-listing"), { rows, total } = listed(view), { t0, t1 } = view.view;
  const from = Math.max(0, t0), to = Math.min(view.span, t1), left = total - rows.length;
  const words = `${total.toLocaleString("en")} operations from ${view.table.time(from)} to ${view.table.time(to)}`;
  const more = left ? `; the first ${rows.length}, ${left.toLocaleString("en")} are left out: zoom in to see them` : "";
  const head = element("thead", {}, line("th", HEAD, -1)), body = rows.map((row) => line("td", row, 1));
  const table = element("table", {}, element("caption", {}, `${words}${more}.`), head, element("tbody", {}, ...body));
  const scroll = element("div", { className: "facts", tabIndex: 0, role: "region", ariaLabel: "Operations in view" }, table);
  place.querySelector(".facts").replaceWith(scroll);
  place.copied = [HEAD, ...rows].map((row) => row.join("\t")).join("\n") + "\n";
}

function create(view) {
  const refused = "the browser refuses to copy: select the table and copy it";
  const copy = () => navigator.clipboard.writeText(place.copied).then(() => view.announce("copied"), () => view.announce(refused));
  const button = element("button", { type: "button", onclick: copy }, "Copy the table");
  const place = element("section", { className: "lanes-listing", ariaLabel: "Table of what is in view" }, button, element("div", { className: "facts" }));
  view.root.querySelector(".lanes-foot").before(place);
  return place;
}

/* Called after each drawing; the table follows a moment later. */
export function showListing(view) {
  const place = view.root.querySelector(".lanes-listing");
  if (!view.showsListing) { if (place) place.remove(); return; }
  clearTimeout(view.listing);
  if (!place) { create(view); fill(view); return; }
  view.listing = setTimeout(() => { if (view.root.isConnected && view.showsListing) fill(view); }, WAIT);
}
