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

/* Set controls, in the address at once: Dash tells other callbacks later. */
export function setControls(values) {
  const query = readAddress();
  for (const [id, value] of Object.entries(values)) query.set(id, String(value));
  writeAddress(query);
  for (const [id, value] of Object.entries(values)) if (document.getElementById(id)) setProps(id, { value });
}

/* Open a page with values of its controls. */
export function openPage(page, values) {
  setControls(values);
  setProps("pages", { value: page });
}

/* Values kept by the browser, as JSON; null if storage is disabled or empty. */
export const stored = (key) => { try { return JSON.parse(localStorage.getItem(key)); } catch { return null; } };
export const store = (key, value) => { try { localStorage.setItem(key, JSON.stringify(value)); } catch { /* disabled */ } };

/* Call back for events inside elements that match a selector. */
export function on(name, selector, callback) {
  document.addEventListener(name, (event) => { const node = event.target.closest?.(selector); if (node) callback(node, event); });
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

/* Give a canvas a size in pixels of the page. */
export function sizeCanvas(canvas, width, height, ratio) {
  const [wide, high] = [width, height].map((pixels) => Math.round(pixels * ratio));
  if (canvas.width !== wide || canvas.height !== high) Object.assign(canvas, { width: wide, height: high });
  Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
}

export const inSight = (node) => Boolean(node?.isConnected && node.offsetParent !== null);

/* Set the attributes that change: the page is observed for changes. */
export function setAttributes(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) if (node.getAttribute(name) !== value) node.setAttribute(name, value);
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
