/* Edits of an order on its lanes: an instruction moves in its worker's program, and the server checks and times the result
   (viz/pages/editing.py). The view keeps the addresses of the lanes before its edits, to undo them. */
import { drawZoomBox } from "viz/axes.js";
import { element } from "viz/page.js";
import { apply, fitSpans, given, hasServer, isGiven, post } from "viz/scenario.js";
import { fetchTable } from "viz/table.js";

/* The work of a lane in the order of its program. */
const program = ({ table }, lane) => table.operations(lane).filter((i) => table.isWork[table.kind[i]]);

/* Edit the lanes that the edits before leave. */
function inTurn(view, edit) {
  view.editing = Promise.resolve(view.editing).then(edit).catch(() => view.announce("These lanes cannot be edited."));
}

async function showLanes(view, address) {
  view.replace(await fetchTable(address), address);
  delete view.root.dataset.original;
  fitSpans([view]);
  if (!isGiven()) await apply();
}

/* Move an operation to another place among the work of its lane. */
async function move(view, operation, to) {
  if (!hasServer() || view.root.dataset.timed || view.table.sources) throw new Error("not a schedule of its own");
  const lane = view.table.laneOf(operation), all = program(view, lane), place = all.indexOf(operation), before = given(view);
  if (place < 0 || to < 0 || to >= all.length || to === place) return;
  const { addresses: [address], message } = await post({ address: before, worker: lane, place, to }, "edit");
  view.edits.push(before);
  await showLanes(view, address);
  view.announce(message);
}

export function shift(view, dir) {
  if (view.selected < 0) { view.announce("Select an instruction first."); return; }
  const lane = view.chosenLane, chosen = view.table.instruction(view.selected);
  inTurn(view, () => { // another may be selected by then
    const all = program(view, lane), place = all.findIndex((i) => view.table.instruction(i) === chosen);
    return move(view, all[place], place + dir);
  });
}

/* A drag with Alt moves the operation under the pointer to where it ends; its lane shows the place. */
export const dragged = (view, { under: { operation, row } }, t) => drawZoomBox(view, { t0: t, t1: t + view.table.end[operation] - view.table.start[operation], y0: row, y1: row + 1 });

export function dropped(view, { under: { operation } }, t) {
  const { table } = view, others = program(view, table.laneOf(operation)).filter((i) => i !== operation);
  inTurn(view, () => table === view.table && move(view, operation, others.filter((i) => (table.start[i] + table.end[i]) / 2 < t).length));
}

export const undoEdit = (view) => inTurn(view, async () => {
  const address = view.edits.pop();
  if (address) await showLanes(view, address);
  view.announce(address ? "undone" : "Nothing was edited.");
});

export function save(view) { element("a", { href: given(view).replace("lanes/", "edited/").replace(".bin", ".json"), download: "edited.json" }).click(); }
