/* Light or dark: the system's choice until a press on the button, then the reader's. Rules for dark pages are in media queries. */
import { store, stored } from "viz/page.js";
const KEY = "recycle-theme", QUERY = "(prefers-color-scheme: dark)", system = matchMedia(QUERY);
const listeners = new Set(), rules = [];
let chosen = stored(KEY);

export const isDark = () => (chosen ? chosen === "dark" : system.matches);

/* Call back when the theme changes, until `signal` aborts. */
export function onTheme(callback, signal) {
  listeners.add(callback);
  signal.addEventListener("abort", () => listeners.delete(callback));
}

function apply() {
  const sheets = rules.length ? [] : [...document.styleSheets].filter(({ href }) => !href || href.startsWith(location.origin));
  rules.push(...sheets.flatMap(({ cssRules }) => [...cssRules].filter((rule) => rule.media?.mediaText === QUERY)));
  for (const { media } of rules) media.mediaText = chosen ? (isDark() ? "all" : "not all") : QUERY;
  for (const callback of listeners) callback();
}

export function switchTheme() {
  chosen = isDark() ? "light" : "dark";
  store(KEY, chosen);
  apply();
}

system.addEventListener("change", apply);
if (chosen) apply();
