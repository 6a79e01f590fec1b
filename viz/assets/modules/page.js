/* Shared by all modules: timelines of the page, the current one, the address, and helpers. */
export const views = new Map(); // name -> timeline
export const lastShown = new Map(); // name -> last window, for a timeline that replaces another
export const state = { active: undefined, left: null }; // the current timeline; the name of one that was current and disappeared

export function element(name, properties, ...children) {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
}

export const setProps = (id, properties) => window.dash_clientside.set_props(id, properties);

export const readAddress = () => new URLSearchParams(location.search);

/* `isStep`: add a step to the browser's history. */
export function writeAddress(query, isStep = false) {
  const text = query.toString().replaceAll("%2C", ",").replaceAll("%2F", "/");
  history[isStep ? "pushState" : "replaceState"](history.state, "", location.pathname + (text ? `?${text}` : "") + location.hash);
}

/* Open a page with the value of one of its controls. */
export function openPage(page, id, value) {
  const query = readAddress();
  query.set(id, String(value));
  writeAddress(query);
  if (document.getElementById(id)) setProps(id, { value });
  setProps("pages", { value: page });
}

/* Call back once per frame with changes of the page. */
export function whenChanged(callback, attributes = [], isRelevant = () => true) {
  let isAsked = false;
  const watched = attributes.length ? { attributes: true, attributeFilter: attributes } : {};
  new MutationObserver((changes) => {
    if (isAsked || !changes.some(isRelevant)) return;
    isAsked = true;
    requestAnimationFrame(() => { isAsked = false; callback(); });
  }).observe(document.documentElement, { childList: true, subtree: true, ...watched });
}

export const inSight = (node) => Boolean(node?.isConnected && node.offsetParent !== null);

/* Set an attribute if it changes: the page is observed for changes. */
export function setAttribute(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

/* Call `move` for the movements of a drag that begins now, and `end` with its last event. */
export function followDrag(move, end = () => {}) {
  const drag = new AbortController(), options = { capture: true, signal: drag.signal };
  window.addEventListener("pointermove", move, options);
  for (const name of ["pointerup", "pointercancel"]) window.addEventListener(name, (event) => { drag.abort(); end(event); }, options);
}

/* Word of the address -> property of a view that shows the layer. */
export const LAYERS = [["path", "path"], ["memory", "showsMemory"], ["held", "showsHeld"], ["table", "showsListing"]];

/* The current timeline if visible, else the first visible one. */
export const viewInUse = () => (inSight(state.active?.root) ? state.active : [...views.values()].find((view) => inSight(view.root)));
