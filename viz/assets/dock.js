/* The dock of the workbench: which panel is open, whether it stands at the right or below, and how large it is. All three are
   remembered by the browser; the panel stands in the page's address too. What the panels say comes from the server, which
   is told which timeline is in use (`asked`), and for the panel of what is in view also which window it shows. */
(function (recycle) {
  "use strict";
  const KEY = "recycle-dock", WAIT = 150, LEAST = 180, STEP = 40, ROOM = 260;
  const NEW = ".bench, .bench-tab, .bench-panel, .lanes, .empty";
  const state = { side: null, right: 380, below: 280, panels: {}, shut: false, ...read() };
  const told = new Map(); // identifier of a store -> what it was told last
  let timer = null;

  function read() {
    try { return JSON.parse(localStorage.getItem(KEY)) || {}; } catch { return {}; }
  }

  function keep() {
    try { localStorage.setItem(KEY, JSON.stringify(state)); } catch { /* a browser that stores nothing */ }
  }

  /* Told only where it is another value: the page is watched for changes. */
  const set = (node, name, value) => { if (node.getAttribute(name) !== value) node.setAttribute(name, value); };
  const inSight = (node) => node && node.offsetParent !== null;
  const bench = () => { const root = document.querySelector(".bench"); return inSight(root) ? root : null; };
  const side = () => state.side || (window.innerWidth >= 1100 ? "right" : "below");
  const tabs = (root) => [...root.querySelectorAll(".bench-tab")].filter((tab) => !tab.closest(".mode[hidden]"));
  const has = (root, name) => tabs(root).some((tab) => tab.dataset.panel === name);

  /* The panel that is open in a mode: the one that a link names, else the one chosen there last, else the mode's own. */
  let named = null;
  const opened = (root) => {
    const { page } = root.dataset;
    return [named, state.panels[page], recycle.modes.place("tabs", page)?.dataset.opened, "selection"].find((name) => name && has(root, name));
  };

  function apply() {
    const { documentElement: page } = document;
    page.dataset.dock = state.shut ? "shut" : side();
    page.style.setProperty("--dock", `${state[side()]}px`);
    const root = document.querySelector(".bench");
    if (!root || !recycle.modes) return;
    recycle.modes.apply(root);
    const name = opened(root);
    for (const tab of root.querySelectorAll(".bench-tab")) {
      const isOpen = tab.dataset.panel === name && !tab.closest(".mode[hidden]");
      set(tab, "aria-selected", String(isOpen));
      set(tab, "tabindex", isOpen ? "0" : "-1");
    }
    for (const panel of root.querySelectorAll(".bench-panel")) panel.hidden = panel.dataset.panel !== name;
    const split = root.querySelector(".bench-split");
    set(split, "aria-orientation", side() === "right" ? "vertical" : "horizontal");
    set(split, "aria-valuenow", String(state[side()]));
  }

  function changed() {
    keep();
    apply();
    window.dispatchEvent(new Event("resize"));
    recycle.dock.tell();
  }

  function size(pixels) {
    const most = (side() === "right" ? window.innerWidth : window.innerHeight) - ROOM;
    state[side()] = Math.round(Math.max(LEAST, Math.min(most, pixels)));
    changed();
  }

  function tellStore(id, data) {
    const key = JSON.stringify(id), text = JSON.stringify(data);
    if (told.get(key) === text) return;
    told.set(key, text);
    window.dash_clientside.set_props(id, { data });
  }

  recycle.dock = {
    apply,

    /* Open a panel of the mode in sight. */
    open(name) {
      const root = bench();
      if (!root || !has(root, name)) return;
      if (opened(root) === name && !state.shut) return;
      named = null;
      state.panels[root.dataset.page] = name;
      state.shut = false;
      const query = new URLSearchParams(location.search);
      query.set("panel", name);
      history.replaceState(history.state, "", `${location.pathname}?${query}${location.hash}`);
      changed();
    },

    shut() { state.shut = !state.shut; changed(); },

    turn() { state.side = side() === "right" ? "below" : "right"; state.shut = false; changed(); },

    get panel() { const root = bench(); return root && !state.shut ? opened(root) : null; },

    /* Tell the server what is in use, a moment after the last change. */
    tell() {
      clearTimeout(timer);
      timer = setTimeout(() => {
        const root = bench(), view = recycle.inUse();
        if (!root || !view || !root.contains(view.root)) {
          if (!root) tellStore("headline-of", null);
          return;
        }
        const { address } = view.root.dataset, panel = recycle.dock.panel, { t0, t1 } = view.view;
        tellStore("headline-of", address);
        if (panel === "scenario") tellStore("bench-asked", { panel, address: view.root.dataset.original || address });
        if (panel === "explain" || panel === "workers") tellStore("bench-asked", { panel, address });
        if (panel === "view") tellStore("bench-window", { panel, address, window: view.range ? [view.range.t0, view.range.t1] : [t0, t1] });
      }, WAIT);
    },

    /* What the bar says of the lanes of an address, where that is known already. */
    headline(address, children) {
      told.set(JSON.stringify("headline-of"), JSON.stringify(address));
      window.dash_clientside.set_props("headline", { children });
    },

    /* What a search found in a timeline, for the panel that lists it. */
    found(view, query, found) {
      const root = view.root.closest(".bench");
      if (!root) return;
      const data = found && { panel: "found", address: view.root.dataset.address, query, ...found };
      tellStore("bench-found", data);
    },
  };

  document.addEventListener("click", (event) => {
    const tab = event.target.closest && event.target.closest(".bench-tab");
    if (tab) recycle.dock.open(tab.dataset.panel);
    const button = event.target.closest && event.target.closest("[data-places]");
    if (button) go(button);
  });

  /* Selects the only place, or frames several. */
  function go(button) {
    const root = button.closest(".bench"), { graph } = button.dataset;
    const shown = root && recycle.modes.lanes(root);
    const holder = shown && shown.querySelector(graph === undefined ? ".lanes-view" : `[data-place="${graph}"] .lanes-view`);
    const used = graph === undefined && root && root.contains(recycle.inUse()?.root) ? recycle.inUse() : null;
    const view = used || (holder && recycle.views.get(holder.dataset.name));
    if (!view) return;
    const places = JSON.parse(button.dataset.places).map(([lane, from, to]) => ({ lane, from, to }));
    if (places.length === 1) view.selectPlace(places[0]);
    view.frame(places);
    recycle.use(view);
  }

  document.addEventListener("keydown", (event) => {
    const { target, key } = event, tab = target.closest && target.closest(".bench-tab"), split = target.closest && target.closest(".bench-split");
    const along = { ArrowRight: 1, ArrowLeft: -1 }[key], more = { ArrowLeft: 1, ArrowUp: 1, ArrowRight: -1, ArrowDown: -1 }[key];
    if (tab && along) {
      const all = tabs(tab.closest(".bench")), next = all[(all.indexOf(tab) + along + all.length) % all.length];
      recycle.dock.open(next.dataset.panel);
      next.focus();
    } else if (split && more) size(state[side()] + more * STEP);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }, true);

  document.addEventListener("pointerdown", (event) => {
    const split = event.target.closest && event.target.closest(".bench-split");
    if (!split) return;
    split.setPointerCapture(event.pointerId);
    const box = split.parentElement.getBoundingClientRect();
    const moved = (move) => size(side() === "right" ? box.right - move.clientX : box.bottom - move.clientY);
    split.addEventListener("pointermove", moved);
    split.addEventListener("pointerup", () => split.removeEventListener("pointermove", moved), { once: true });
    event.preventDefault();
  });

  const wanted = new URLSearchParams(location.search);
  named = wanted.get("panel") || (wanted.get("pages") === "explain" ? "explain" : null);
  if (named) state.shut = false;

  /* Dash puts pages there at any time. */
  let looking = false;
  const look = () => {
    if (looking) return;
    looking = true;
    requestAnimationFrame(() => { looking = false; apply(); recycle.dock.tell(); });
  };
  new MutationObserver((changes) => {
    const isNew = ({ addedNodes }) => [...addedNodes].some((node) => node.querySelector && (node.matches(NEW) || node.querySelector(NEW)));
    if (changes.some((change) => change.type === "attributes" || isNew(change))) look();
  }).observe(document.documentElement, { childList: true, subtree: true, attributes: true, attributeFilter: ["aria-selected"] });
  window.addEventListener("resize", () => { document.documentElement.dataset.dock = state.shut ? "shut" : side(); });
})(window.recycle = window.recycle || {});
