/* Light or dark: the system's choice until a press on the button, then the reader's. Rules for dark pages are in media queries. */
const KEY = "recycle-theme", QUERY = "(prefers-color-scheme: dark)", system = matchMedia(QUERY);
const listeners = new Set();
let chosen = read();

function read() {
  try { return localStorage.getItem(KEY); } catch { return null; }
}

export const isDark = () => (chosen ? chosen === "dark" : system.matches);

/* Call back when the theme changes, until `signal` aborts. */
export function onTheme(callback, signal) {
  listeners.add(callback);
  signal.addEventListener("abort", () => listeners.delete(callback));
}

function apply() {
  for (const { ownerNode, cssRules } of document.styleSheets) {
    if (ownerNode?.href && !ownerNode.href.startsWith(location.origin)) continue;
    for (const rule of cssRules) if (rule.isDarkRule ||= rule.media?.mediaText === QUERY) rule.media.mediaText = chosen ? (isDark() ? "all" : "not all") : QUERY;
  }
  for (const callback of listeners) callback();
}

export function switchTheme() {
  chosen = isDark() ? "light" : "dark";
  try { localStorage.setItem(KEY, chosen); } catch { /* storage may be disabled */ }
  apply();
}

system.addEventListener("change", apply);
if (chosen) apply();
