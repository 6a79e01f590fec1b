/* Modes of the workbench: which page's lanes, controls and panels are in sight. Lanes of the mode before stay while the new
   one has none, and a mode that comes into sight shows the window and the selection that the one before had, as far as
   they are there too. */
window.dash_clientside = window.dash_clientside || {};
(function (recycle) {
  "use strict";
  let drawn = null, left = null; // the page whose lanes are in sight; what the view in use showed when another mode came

  const places = (root) => [...root.querySelectorAll(".mode")];
  const of = (root, part, page) => places(root).find((place) => place.dataset.page === page && place.parentElement.classList.contains(`bench-${part}`));
  const isFilled = (place) => Boolean(place?.querySelector(".through > *"));
  const show = (node, isShown) => { if (node.hidden === isShown) node.hidden = !isShown; };

  recycle.modes = {
    place: (part, page) => of(document.querySelector(".bench"), part, page),

    /* The block of lanes in sight. */
    lanes: (root) => of(root, "lanes", drawn),

    apply(root) {
      const { page } = root.dataset, own = of(root, "lanes", page);
      if (own && (isFilled(own) || !isFilled(of(root, "lanes", drawn)))) drawn = page;
      for (const place of places(root)) show(place, place.dataset.page === (place.parentElement.classList.contains("bench-lanes") ? drawn : page));
    },

    /* A view that is attached in a mode that came into sight takes over what the one before showed. */
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
    const query = new URLSearchParams(location.search);
    if (query.get("view") === view.name) return; // the address says what it shows
    const { t0, t1, y0, y1 } = from.window, isWhole = t0 <= 0 && t1 >= from.span, { rows, table } = view;
    const isOther = rows.grouping !== from.rows.grouping || rows.folded.size !== from.rows.folded.size || rows.pinned.length !== from.rows.pinned.length;
    if (table.lanes === from.lanes && isOther) view.setRows(from.rows.grouping, new Set(from.rows.folded), true, from.rows.pinned);
    view.show({ ...(isWhole || t0 >= view.span ? {} : { t0, t1 }), ...(view.rows.count === from.rows.count ? { y0, y1 } : {}) }, false);
    if (view.root.dataset.address !== from.address || (from.selected < 0 && !from.gap)) return;
    view.isCarried = true;
    if (from.selected >= 0) view.select(from.selected, true); else view.selectGap(from.gap.lane, from.gap.from, from.gap.to, true);
    recycle.use(view);
  }

  /* The panel of the selection is about the view in use: of another mode it is another one. */
  function tellSelection() {
    const view = recycle.inUse();
    if (view && view.selected >= 0) view._send({ operation: view.selected });
    else if (view?.gap) view._send(view.gap);
    else window.dash_clientside.set_props("bench-choice", { data: null });
  }

  window.dash_clientside.recycle = Object.assign(window.dash_clientside.recycle || {}, {
    /* Called with the page that is open. */
    showMode(page) {
      const root = document.querySelector(".bench"), { no_update } = window.dash_clientside;
      if (!root || root.dataset.page === page) return no_update;
      const used = recycle.inUse();
      if (used) left = snapshot(used);
      root.dataset.page = page;
      show(root, of(root, "lanes", page) !== undefined);
      const before = drawn;
      recycle.dock.apply();
      if (!root.hidden && drawn === page && before !== page) {
        for (const view of recycle.views.values()) if (view.page === page) recycle.modes.carry(view);
        tellSelection();
      }
      recycle.dock.tell();
      return no_update;
    },
  });
})(window.recycle = window.recycle || {});
