/* A control whose value stands in the page's address: restored from it when the page opens, written to it when changed. */
window.recycle = window.recycle || {};
(function (recycle) {
  "use strict";
  const restored = new Set();

  /* What the control should hold: what the address says at first, then what it holds. */
  recycle.address = function (key, value, allowed) {
    const query = new URLSearchParams(location.search), stated = query.get(key);
    if (!restored.has(key)) {
      restored.add(key);
      const wanted = allowed ? stated : Number(stated);
      const usable = stated !== null && (allowed ? allowed.includes(wanted) : Number.isInteger(wanted));
      return usable && wanted !== value ? wanted : window.dash_clientside.no_update;
    }
    query.set(key, value);
    history.replaceState(history.state, "", `${location.pathname}?${query}${location.hash}`);
    return window.dash_clientside.no_update;
  };
})(window.recycle);
