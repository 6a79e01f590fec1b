/* Controls whose value stands in the page's address: restored from it when the page opens, written to it when changed. */
window.dash_clientside = window.dash_clientside || {};
(function () {
  "use strict";
  const restored = new Map(); // identifier -> its value before any address said another

  /* `isStep`: the browser's Back leads to what was there before. */
  function write(query, isStep = false) {
    const text = query.toString().replaceAll("%2C", ",");
    history[isStep ? "pushState" : "replaceState"](history.state, "", location.pathname + (text ? `?${text}` : "") + location.hash);
    return window.dash_clientside.no_update;
  }
  const pages = new Set(); // identifiers of tabs

  window.addEventListener("popstate", () => {
    const query = new URLSearchParams(location.search);
    for (const id of pages) window.dash_clientside.set_props(id, { value: query.get(id) || restored.get(id) });
  });

  window.dash_clientside.recycle = Object.assign(window.dash_clientside.recycle || {}, {
    /* What the control should hold: what the address says at first, then what it holds. Allowed are the values of `tabs`,
       or any whole number where there are none. */
    keepInAddress(value, tabs) {
      const key = window.dash_clientside.callback_context.outputs_list.id;
      const query = new URLSearchParams(location.search), stated = query.get(key);
      if (!restored.has(key)) {
        restored.set(key, value);
        if (tabs) pages.add(key);
        const wanted = tabs ? stated : Number(stated);
        const usable = stated !== null && (tabs ? tabs.some((tab) => tab.props.value === wanted) : Number.isInteger(wanted));
        return usable && wanted !== value ? wanted : window.dash_clientside.no_update;
      }
      const isStep = Boolean(tabs) && (stated || restored.get(key)) !== value;
      query.set(key, value);
      return write(query, isStep);
    },

    /* The failed workers of the what-if page. */
    failedInAddress(state) {
      const query = new URLSearchParams(location.search);
      if (state && state.failed.length) query.set("fail", state.failed.join(",")); else query.delete("fail");
      return write(query);
    },
  });
})();
