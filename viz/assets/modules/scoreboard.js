/* Tables of schedules and workers: sorted by a press on a head, pictures of lanes, and two picked rows to compare. */
import { valueOf } from "viz/address.js";
import { Picture } from "viz/draw.js";
import { element, inSight, on, openPage, setProps, sizeCanvas, whenChanged } from "viz/page.js";
import { Raster } from "viz/raster.js";
import { Rows } from "viz/rows.js";
import { fetchTable } from "viz/table.js";
import { themeOf } from "viz/view.js";
const SORTED = ".scoreboard, .sortable", WIDTH = 200, LANE = 7, LOW = 16, HIGH = 56;

/* Draw the lanes of a table, with a time axis of length `span`. */
function draw(place, table, span) {
  const ratio = window.devicePixelRatio || 1, high = Math.min(HIGH, Math.max(LOW, LANE * table.lanes)), canvas = element("canvas", { role: "img", ariaLabel: `Lanes of ${place.dataset.title}` });
  const rows = new Rows(table, "pipeline", new Set()), theme = themeOf(place, table), box = { left: 0, top: 0, width: WIDTH, height: high };
  const picture = new Picture(table, rows, { t0: 0, t1: span, y0: 0, y1: rows.count }, box, ratio, theme), raster = new Raster(picture.width, picture.height);
  if (table.length < table.lanes * WIDTH) Object.defineProperty(picture, "level", { value: 1 }); // rectangles of a pixel still tell
  picture._fill(raster, {});
  sizeCanvas(canvas, WIDTH, high, ratio);
  canvas.getContext("2d").putImageData(raster.image, 0, 0);
  place.replaceChildren(canvas);
}

function drawAll() {
  const places = [...document.querySelectorAll(".lanes-spark:empty:not([data-asked])")].filter(inSight);
  for (const place of places) place.dataset.asked = "yes";
  Promise.all(places.map((place) => fetchTable(place.dataset.address))).then((tables) => {
    places.forEach((place, at) => draw(place, tables[at], Math.max(...tables.filter((table) => table.unit[1] === tables[at].unit[1]).map((table) => table.span)) || 1));
  });
}
whenChanged(drawAll, ["hidden"]);

const keyOf = (cell) => { const text = cell?.querySelector("[data-sort]")?.dataset.sort ?? cell?.textContent ?? ""; return text === "–" ? NaN : Number.isNaN(Number(text)) ? text : Number(text); };

function sort(head) {
  const table = head.closest("table"), body = table.tBodies[0], at = head.cellIndex, up = head.ariaSort === "ascending" ? -1 : 1;
  for (const other of head.parentElement.cells) other.ariaSort = "none";
  head.ariaSort = up > 0 ? "ascending" : "descending";
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? (Number.isNaN(a) ? 1 : Number.isNaN(b) ? -1 : up * (a - b)) : up * String(a).localeCompare(String(b), "en", { numeric: true }));
  body.append(...[...body.rows].sort((a, b) => compare(keyOf(a.cells[at]), keyOf(b.cells[at]))));
}

/* Pick a row, or not any more; the second of two schedules is compared with the first, runs with all that the control `target` names. */
function pick(row) {
  const { pick: name, target } = row.querySelector("[data-pick]").dataset;
  if (target) {
    const names = (valueOf(target) || "").split("/").filter(Boolean), others = names.filter((other) => other !== name);
    setProps(target, { value: (others.length < names.length ? others : [...names, name]).join("/") });
    return;
  }
  row.ariaSelected = String(row.ariaSelected !== "true");
  const picked = [...row.parentElement.rows].filter((other) => other.ariaSelected === "true").sort((a, b) => (a === row) - (b === row));
  const value = picked.map((other) => other.querySelector("[data-pick]").dataset.pick);
  if (picked.length < 2) return;
  for (const other of picked) other.ariaSelected = "false";
  openPage("compare", { "compare-chosen": value });
}

/* Called with the names that a control holds, separated by slashes, which no name of a folder has. */
export function markPicked({ inputs_list: [{ id }] }, names) {
  for (const { dataset: { pick: name }, parentElement } of document.querySelectorAll(`[data-target="${id}"]`)) parentElement.closest("tr").ariaSelected = String(names.split("/").includes(name));
  return window.dash_clientside.no_update;
}

on("click", `:is(${SORTED}) thead th`, sort);
on("click", ".scoreboard tbody tr", (row) => { if (row.querySelector("[data-pick]")) pick(row); });
on("keydown", "[data-pick]", (cell, { key }) => { if (key === "Enter") pick(cell.closest("tr")); });
