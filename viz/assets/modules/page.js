/* What all modules share: the timelines on the page, which one is in use, its address, and small helpers of the document. */
export const views = new Map(); // name -> timeline
export const lastShown = new Map(); // name -> what was shown last, for a timeline that takes another's place
export const state = { active: undefined, left: null }; // the timeline last used; the name of one that was in use and went

export function element(name, properties, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

export const setProps = (id, properties) => window.dash_clientside.set_props(id, properties);

export const readAddress = () => new URLSearchParams(location.search);

/* `isStep`: the browser's Back leads to what was there before. */
export function writeAddress(query, isStep = false) {
  const text = query.toString().replaceAll("%2C", ",").replaceAll("%2F", "/");
  history[isStep ? "pushState" : "replaceState"](history.state, "", location.pathname + (text ? `?${text}` : "") + location.hash);
}

/* Calls back once per frame in which something of the page has changed: Dash puts parts there at any time. */
export function whenChanged(callback, attributes = [], isRelevant = () => true) {
  let isAsked = false;
  const watched = attributes.length ? { attributes: true, attributeFilter: attributes } : {};
  new MutationObserver((changes) => {
    if (isAsked || !changes.some(isRelevant)) return;
    isAsked = true;
    requestAnimationFrame(() => { isAsked = false; callback(); });
  }).observe(document.documentElement, { childList: true, subtree: true, ...watched });
}

const inSight = (view) => view && view.root.isConnected && view.root.offsetParent !== null;

/* The timeline last used, or where that is on a page that is not open, the first in sight. */
export const viewInUse = () => (inSight(state.active) ? state.active : [...views.values()].find(inSight));
