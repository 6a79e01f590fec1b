/* Modes of the workbench: pages whose lanes, controls and panels are visible. The previous mode's lanes stay while the new
   one has none. The new mode takes over window and selection as far as possible. */
import { dock, useView } from "viz/dock.js";
import { restore, writeNow } from "viz/link.js";
import { readAddress, setProps, state, viewInUse, views } from "viz/page.js";
let drawn = null, left = null; // the page with visible lanes; the state of the view that was current before the mode changed

const of = (root, page) => [...root.querySelectorAll(".bench-lanes > .mode")].find((place) => place.dataset.page === page);
const isFilled = (place) => Boolean(place?.querySelector(".through > *"));
const show = (node, isShown) => { if (node.hidden === isShown) node.hidden = !isShown; };

export const modes = {
  place: (page) => of(document.querySelector(".bench"), page),

  /* The visible block of lanes. */
  lanes: (root) => of(root, drawn),

  apply(root) {
    const { page } = root.dataset, own = of(root, page);
    if (own && (isFilled(own) || !isFilled(of(root, drawn)))) drawn = page;
    for (const place of document.querySelectorAll(".mode")) show(place, place.dataset.page === (place.parentElement.classList.contains("bench-lanes") ? drawn : page));
  },

  /* Apply the previous mode's state to a new view. */
  carry(view) {
    if (!left || left.page === view.page || view.page !== drawn || left.taken.has(view.name)) return;
    left.taken.add(view.name);
    take(view, left);
  },
};

const snapshot = (view) => view && {
  page: view.page, address: view.root.dataset.address, window: { ...view.view }, span: view.span, rows: view.rows,
  selected: view.selected, gap: view.gap, lanes: view.table.lanes, taken: new Set(),
};

function take(view, from) {
  const query = readAddress();
  if (query.get("view") === view.name) return; // the address sets it
  const { t0, t1, y0, y1 } = from.window, isWhole = t0 <= 0 && t1 >= from.span, { rows, table } = view;
  const isOther = rows.grouping !== from.rows.grouping || rows.folded.size !== from.rows.folded.size || rows.pinned.length !== from.rows.pinned.length;
  if (table.lanes === from.lanes && isOther) view.setRows(from.rows.grouping, new Set(from.rows.folded), true, from.rows.pinned);
  view.show({ ...(isWhole || t0 >= view.span ? {} : { t0, t1 }), ...(view.rows.count === from.rows.count ? { y0, y1 } : {}) }, false, false);
  if (state.active?.used && state.active.page === view.page) return; // used before this one came
  if (view.root.dataset.address !== from.address || (from.selected < 0 && !from.gap)) return;
  view.isCarried = true;
  if (from.selected >= 0) view.select(from.selected, true); else view.selectGap(from.gap.lane, from.gap.from, from.gap.to, true);
  useView(view);
}

/* Called with the page of the chosen tab. */
export function showMode(_, page) {
  const root = document.querySelector(".bench"), { no_update } = window.dash_clientside;
  if (!root || root.dataset.page === page) return no_update;
  const used = viewInUse();
  writeNow();
  if (used) left = snapshot(used);
  root.dataset.page = page;
  show(root, of(root, page).dataset.opened !== undefined);
  const before = drawn;
  dock.apply();
  if (!root.hidden && drawn === page && before !== page) {
    const named = views.get(readAddress().get("view"));
    if (named?.page === page) restore(named); // after a step back
    for (const view of views.values()) if (view.page === page) modes.carry(view);
    const now = viewInUse();
    if (now?.chosenLane >= 0) now._sendChosen(); else setProps("bench-choice", { data: null });
  }
  dock.tell();
  dock.namePanel();
  return no_update;
}
