/* Stands in for the page, as far as modules look at it while they are loaded, and tells node where they are. */
import { register } from "node:module";

const find = `export const resolve = (name, context, next) => name.startsWith("viz/")
  ? { url: ${JSON.stringify(process.env.MODULES)} + "/" + name.slice(4), format: "module", shortCircuit: true } : next(name, context);`;
register(`data:text/javascript,${encodeURIComponent(find)}`);

const nothing = () => {};
class Observer { observe() {} disconnect() {} }
Object.assign(globalThis, {
  document: { addEventListener: nothing, createElement: () => ({ append: nothing }), documentElement: { dataset: {}, style: {} }, querySelector: () => null, querySelectorAll: () => [], getElementById: () => null },
  window: { addEventListener: nothing, fetch: nothing, dash_clientside: { no_update: "no update", set_props: nothing } },
  location: { search: "", pathname: "/", hash: "" }, history: { state: null, replaceState: nothing, pushState: nothing },
  localStorage: { getItem: () => null }, matchMedia: () => ({ matches: false, addEventListener: nothing }), MutationObserver: Observer, ResizeObserver: Observer, IntersectionObserver: Observer,
});
