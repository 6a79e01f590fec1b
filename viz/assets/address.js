/* Controls whose value stands in the page's address: restored from it when the page opens, written to it when changed. */
window.dash_clientside = window.dash_clientside || {};
(function () {
  "use strict";
  const kept = new Map(); // identifier -> {first, choices}: its value before any address said another, and what it may be

  /* `isStep`: the browser's Back leads to what was there before. */
  function write(query, isStep = false) {
    const text = query.toString().replaceAll("%2C", ",").replaceAll("%2F", "/");
    history[isStep ? "pushState" : "replaceState"](history.state, "", location.pathname + (text ? `?${text}` : "") + location.hash);
    return window.dash_clientside.no_update;
  }

  /* Values that tabs, options by value, or options by name allow. */
  const values = (choices) => (Array.isArray(choices) ? choices.map((one) => one.props?.value ?? one.value ?? one) : Object.keys(choices));
  const written = (value) => (Array.isArray(value) ? value.join(",") : String(value));

  /* The value that the address says for a control, `first` where it says none that is allowed: any text, or whole numbers
     without choices. */
  function stated(query, id, { first, choices }) {
    const text = query.get(id);
    if (text === null || choices === "text") return text ?? first;
    if (!choices) return Number.isInteger(Number(text)) ? Number(text) : first;
    const named = Array.isArray(first) ? text.split(",").filter(Boolean) : [text];
    if (!named.every((one) => values(choices).includes(one))) return first;
    return Array.isArray(first) ? named : text;
  }

  /* What moves by itself leaves no steps behind: a run that is played or followed. */
  const isMoving = () => document.querySelector(".player .playing, .following input:checked") !== null;

  window.addEventListener("popstate", () => {
    const query = new URLSearchParams(location.search);
    for (const [id, control] of kept) {
      if (document.getElementById(id)) window.dash_clientside.set_props(id, { value: stated(query, id, control) });
    }
  });

  window.dash_clientside.recycle = Object.assign(window.dash_clientside.recycle || {}, {
    /* What the control should hold: what the address says at first, then what it holds. */
    keepInAddress(value, choices) {
      const { id } = window.dash_clientside.callback_context.outputs_list, query = new URLSearchParams(location.search);
      if (!kept.has(id)) {
        kept.set(id, { first: value, choices });
        const wanted = stated(query, id, kept.get(id));
        if (id === "fail" && wanted && !query.has("pages")) window.dash_clientside.set_props("pages", { value: "plans" });
        return written(wanted) !== written(value) ? wanted : window.dash_clientside.no_update;
      }
      kept.get(id).choices = choices;
      const isStep = (query.get(id) ?? written(kept.get(id).first)) !== written(value) && !isMoving();
      if (choices === "text" && !value) query.delete(id); else query.set(id, written(value));
      return write(query, isStep);
    },
  });
})();
