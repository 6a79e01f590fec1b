/* The dock of the workbench: its open panel, side and size, kept in the browser; the panel also in the address. The server
   fills panels on request (stores `bench-PANEL`). */
import { remember } from "viz/link.js";
import { modes } from "viz/modes.js";
import { element, followDrag, inSight, on, readAddress, setAttributes, setProps, state, store, stored, viewInUse, views, whenChanged, writeAddress } from "viz/page.js";
import { fetchBytes, unpackAnswer } from "viz/table.js";
const KEY = "recycle-dock", WAIT = 150, MIN_SIZE = 180, STEP = 40, ROOM = 260;
const NEW = ".bench, .bench-tab, .bench-panel, .lanes, .empty";
const chosen = { side: null, right: 380, below: 280, panels: {}, shut: false, ...stored(KEY) };
const sent = new Map(); // identifier of a store -> its last content
let timer = null, naming = null;

const bench = () => { const root = document.querySelector(".bench"); return inSight(root) ? root : null; };
const side = () => chosen.side || (window.innerWidth >= 1100 ? "right" : "below");
const panels = (root) => [...root.querySelectorAll(".bench-panel")].filter((panel) => !panel.closest(".mode[hidden]"));
const has = (root, name) => panels(root).some((panel) => panel.dataset.panel === name);

/* The open panel: named in the address, else chosen last in this mode, else the mode's first. */
let named = readAddress().get("panel");
if (named) chosen.shut = false;
const opened = (root) => {
  const { page } = root.dataset;
  return [named, chosen.panels[page], modes.place(page)?.dataset.opened, "selection"].find((name) => name && has(root, name));
};

/* A tab per panel of the visible mode. */
function tabs(root) {
  const bar = root.querySelector(".bench-tabs"), shown = panels(root), names = shown.map(({ dataset }) => dataset.panel).join(" ");
  if (bar.dataset.names !== names) {
    bar.replaceChildren(...shown.map((panel) => {
      const tab = element("button", { className: "bench-tab", role: "tab" }, panel.ariaLabel);
      tab.dataset.panel = panel.dataset.panel;
      return tab;
    }));
    bar.dataset.names = names;
  }
  return [...bar.children];
}

function apply() {
  const { documentElement: page } = document;
  page.dataset.dock = chosen.shut ? "shut" : side();
  page.style.setProperty("--dock", `${chosen[side()]}px`);
  const root = document.querySelector(".bench");
  if (!root) return;
  modes.apply(root);
  const name = opened(root);
  for (const tab of tabs(root)) setAttributes(tab, { "aria-selected": String(tab.dataset.panel === name), tabindex: tab.dataset.panel === name ? "0" : "-1" });
  for (const panel of root.querySelectorAll(".bench-panel")) panel.hidden = panel.dataset.panel !== name;
  const orientation = side() === "right" ? "vertical" : "horizontal";
  setAttributes(root.querySelector(".bench-split"), { "aria-orientation": orientation, "aria-valuenow": String(chosen[side()]) });
}

function changed() {
  store(KEY, chosen);
  apply();
  window.dispatchEvent(new Event("resize"));
  dock.tell();
}

function size(pixels) {
  const most = (side() === "right" ? window.innerWidth : window.innerHeight) - ROOM;
  chosen[side()] = Math.round(Math.max(MIN_SIZE, Math.min(most, pixels)));
  changed();
}

function tellStore(id, data) {
  const key = JSON.stringify(id), text = JSON.stringify(data);
  if (sent.get(key) === text) return;
  sent.set(key, text);
  setProps(id, { data });
}

/* Make a timeline the current one, for keys, panels and the bar. */
export function useView(view) {
  const isOther = state.active !== view || !view.used;
  state.active = view;
  view.used = true;
  if (isOther) { view._sendChosen(); remember(view); }
  dock.tell();
}

/* Dash drops the answers to earlier requests for the same panel. */
const ask = (panel, data) => tellStore(`bench-${panel}`, data);

export const dock = {
  apply,

  /* Open a panel of the visible mode. */
  open(name) {
    const root = bench();
    if (!root || !has(root, name)) return;
    if (opened(root) === name && !chosen.shut) return;
    named = null;
    chosen.panels[root.dataset.page] = name;
    chosen.shut = false;
    const query = readAddress();
    query.set("panel", name);
    writeAddress(query);
    changed();
  },

  /* After a change of the mode: name its panel in the address, where the name of the mode has been written first. */
  namePanel() {
    clearTimeout(naming);
    naming = setTimeout(() => {
      const root = bench(), query = readAddress(), name = root && chosen.panels[root.dataset.page];
      if (named) return;
      if (name) query.set("panel", name); else query.delete("panel");
      writeAddress(query);
    }, WAIT);
  },

  shut() { chosen.shut = !chosen.shut; changed(); },

  turn() { chosen.side = side() === "right" ? "below" : "right"; chosen.shut = false; changed(); },

  get panel() { const root = bench(); return root && !chosen.shut ? opened(root) : null; },

  /* Send the current timeline to the server, a moment after the last change. */
  tell() {
    clearTimeout(timer);
    timer = setTimeout(() => {
      const view = viewInUse();
      for (const each of views.values()) each.root.toggleAttribute("data-current", each === view);
      if (!bench()?.contains(view?.root)) { dock.headline(""); return; }
      const { address } = view.root.dataset, panel = dock.panel, { t0, t1 } = view.view;
      dock.headline(address);
      if (["figures", "explain", "workers"].includes(panel)) ask(panel, { address });
      if (panel === "view") ask(panel, { address, window: view.range ? [view.range.t0, view.range.t1] : [t0, t1] });
    }, WAIT);
  },

  /* Forget what was asked. */
  forget() { sent.clear(); },

  /* Show figures as [name, value, meaning]; of an address alone, those that the server tells. */
  async headline(address, figures) {
    const place = document.getElementById("headline");
    if (!place || (!figures && place.dataset.of === address)) return;
    place.dataset.of = address;
    const answer = address && !figures ? await fetchBytes(address.replace("lanes/", "figures/")).then(unpackAnswer).catch(() => null) : { headline: figures || [] };
    if (place.dataset.of !== address) return;
    if (!answer) place.dataset.of = ""; // ask again
    place.replaceChildren(...(answer?.headline || []).map(([name, value, title]) => element("span", { title }, `${name} `, element("strong", {}, value))));
  },

  /* List the matches of a search in their panel. */
  listMatches(view, query, result) {
    if (view.root.closest(".bench")) ask("found", { address: view.root.dataset.address, query, ...result });
  },
};

on("click", ".bench-tab", (tab) => dock.open(tab.dataset.panel));
on("click", "[data-places]", (button) => go(button));
on("click", "[data-only]", (button) => viewInUse()?.only(button.dataset.only));
for (const name of ["pointerover", "focusin", "pointerout", "focusout"]) on(name, "tr:has([data-home])", (row) => viewInUse()?.setRibbons(name.endsWith("out") ? null : row.querySelector("[data-home]").dataset));

/* Select the only place, or frame several. */
function go(button) {
  const root = button.closest(".bench"), { graph } = button.dataset, place = graph === undefined ? "" : `[data-place="${graph}"] `;
  const holder = modes.lanes(root)?.querySelector(`${place}.lanes-view`), used = viewInUse();
  const view = graph === undefined && root.contains(used?.root) ? used : views.get(holder?.dataset.name);
  if (!view) return;
  const places = JSON.parse(button.dataset.places).map(([lane, from, to]) => ({ lane, from, to }));
  if (places.length === 1) view.selectPlace(places[0]);
  view.frame(places);
  useView(view);
}

document.addEventListener("keydown", (event) => {
  const { target, key } = event, tab = target.closest?.(".bench-tab"), split = target.closest?.(".bench-split");
  const along = { ArrowRight: 1, ArrowLeft: -1 }[key], more = { ArrowLeft: 1, ArrowUp: 1, ArrowRight: -1, ArrowDown: -1 }[key];
  if (tab && along) {
    const all = tabs(tab.closest(".bench")), next = all[(all.indexOf(tab) + along + all.length) % all.length];
    dock.open(next.dataset.panel);
    next.focus();
  } else if (split && more) size(chosen[side()] + more * STEP);
  else return;
  event.preventDefault();
  event.stopPropagation();
}, true);

on("pointerdown", ".bench-split", (split, event) => {
  const box = split.parentElement.getBoundingClientRect();
  followDrag((move) => size(side() === "right" ? box.right - move.clientX : box.bottom - move.clientY));
  event.preventDefault();
});

const isNew = ({ addedNodes }) => [...addedNodes].some((node) => node.querySelector && (node.matches(NEW) || node.querySelector(NEW)));
whenChanged(() => { apply(); dock.tell(); }, ["aria-selected"], (change) => change.type === "attributes" || isNew(change));
window.addEventListener("popstate", () => { named = readAddress().get("panel"); apply(); dock.tell(); });
window.addEventListener("resize", () => { document.documentElement.dataset.dock = chosen.shut ? "shut" : side(); });
