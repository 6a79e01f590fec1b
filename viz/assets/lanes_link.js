/* The address keeps what is looked at: view, window, rows, grouping, folded groups, selection. An address that names other
   contents (`lanes` no longer the table shown) restores the window only. */
(function (recycle) {
  "use strict";
  const WAIT = 300;
  let timer = null;

  const digest = (view) => view.root.dataset.address.replace(/^.*\/|\.bin$/g, "").slice(0, 12);
  const short = (value) => String(+value.toPrecision(9));

  recycle.remember = function (view) {
    if (recycle.active !== view || !view.used) return;
    clearTimeout(timer);
    timer = setTimeout(() => {
      if (!view.root.isConnected || !recycle.axes(view.plot)) return;
      const { t0, t1, y0, y1 } = view.view, query = new URLSearchParams(location.search);
      const words = {
        view: view.name, plan: digest(view), t0: short(t0), t1: short(t1), lanes: `${short(y0)}-${short(y1)}`,
        group: view.rows.grouping, fold: [...view.rows.folded].join("."), sel: view.selected >= 0 ? view.selected : "",
      };
      for (const [name, value] of Object.entries(words)) {
        if (value === "") query.delete(name); else query.set(name, value);
      }
      history.replaceState(history.state, "", `${location.pathname}?${query}${location.hash}`);
    }, WAIT);
  };

  recycle.restore = function (view) {
    const query = new URLSearchParams(location.search), lanes = /^([\d.e+-]+?)-([\d.e+]+)$/.exec(query.get("lanes") || "");
    const before = recycle.lastOf.get(view.name);
    if (query.get("view") !== view.name) {
      if (before && before.span === view.span) view.show({ t0: before.t0, t1: before.t1, ...(before.count === view.rows.count ? { y0: before.y0, y1: before.y1 } : {}) });
      return;
    }
    const number = (name) => (query.get(name) ? Number(query.get(name)) : NaN), same = query.get("plan") === digest(view);
    const folded = new Set((query.get("fold") || "").split(".").filter(Boolean).map(Number).filter(Number.isInteger));
    if (query.get("group") === "stage" || folded.size) view.setRows(query.get("group") === "stage" ? "stage" : "pipeline", folded);
    const [t0, t1] = [number("t0"), number("t1")], window_ = {};
    if (t1 > t0) Object.assign(window_, { t0, t1 });
    if (lanes && Number(lanes[2]) > Number(lanes[1])) Object.assign(window_, { y0: Number(lanes[1]), y1: Number(lanes[2]) });
    if (Object.keys(window_).length) view.show(window_);
    const selected = number("sel");
    if (same && Number.isInteger(selected) && selected >= 0 && selected < view.table.length) view.select(selected);
    recycle.active = view;
  };
})(window.recycle = window.recycle || {});
