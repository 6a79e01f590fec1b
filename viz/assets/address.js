/* Controls whose value stands in the page's address: restored from it when the page opens, written to it when changed. */
window.dash_clientside = window.dash_clientside || {};
(function () {
  "use strict";
  const restored = new Set();

  function write(query) {
    const text = query.toString().replaceAll("%2C", ",");
    history.replaceState(history.state, "", location.pathname + (text ? `?${text}` : "") + location.hash);
    return window.dash_clientside.no_update;
  }

  window.dash_clientside.recycle = Object.assign(window.dash_clientside.recycle || {}, {
    /* What the control should hold: what the address says at first, then what it holds. Allowed are the values of `tabs`,
       or any whole number where there are none. */
    keepInAddress(value, tabs) {
      const key = window.dash_clientside.callback_context.outputs_list.id;
      const query = new URLSearchParams(location.search), stated = query.get(key);
      if (!restored.has(key)) {
        restored.add(key);
        const wanted = tabs ? stated : Number(stated);
        const usable = stated !== null && (tabs ? tabs.some((tab) => tab.props.value === wanted) : Number.isInteger(wanted));
        return usable && wanted !== value ? wanted : window.dash_clientside.no_update;
      }
      query.set(key, value);
      return write(query);
    },

    /* The failed workers of the what-if page. */
    failedInAddress(state) {
      const query = new URLSearchParams(location.search);
      if (state && state.failed.length) query.set("fail", state.failed.join(",")); else query.delete("fail");
      return write(query);
    },
  });
})();
