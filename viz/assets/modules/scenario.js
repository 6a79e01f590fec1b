/* The scenario of the page (viz/scenario.py): its texts, form, banner and sliders. All timelines that the server did not time
   itself (`data-timed`) are replaced by those under the scenario, together; answers to outdated questions are dropped. */
import { dock } from "viz/dock.js";
import { element, inSight, on, readAddress, setProps, viewInUse, views, whenChanged, writeAddress } from "viz/page.js";
import { unpackAnswer } from "viz/table.js";
const HEADERS = { "Content-Type": "application/json" }, STEPS = 40, WAIT = 250;
export const hasServer = () => document.getElementById("times") !== null;
const texts = { times: readAddress().get("times") || "", workers: readAddress().get("fail") || "" };
const sent = [], seen = { times: "", workers: "" }; // times that Dash has yet to give back; what it gave last
let question = 0, changes = 0, names = "", telling = null; // changes: of the times, by the reader

export const post = (body, path = "scenario") => fetch(path, { method: "POST", headers: HEADERS, body: JSON.stringify(body) }).then((answer) => {
  if (!answer.ok) throw new Error("The server refused the request. Reload the page.");
  return answer.arrayBuffer();
}).then(unpackAnswer);
const fields = () => Object.fromEntries(texts.times.split(" ").filter(Boolean).map((word) => word.split(/=(.*)/)));
export const isGiven = () => !texts.times && !texts.workers;
export const given = ({ root: { dataset } }) => dataset.original || dataset.address;
/* Another value after each change of the scenario. */
export const version = () => question;

/* The address of lanes under the scenario; a scenario that does not fit leaves them as given. */
export async function addressUnder(address, isTimed) {
  if (isTimed || isGiven() || !hasServer()) return address;
  const { addresses } = await post({ addresses: [address], ...texts });
  return addresses?.[0] || address;
}

function say(text) {
  for (const place of document.querySelectorAll(".retime-message")) place.textContent = text;
  document.querySelector(".banner")?.classList.toggle("wrong", Boolean(text));
  drawBanner(text);
}

/* Give linked timelines with one unit one span. */
export function fitSpans(all) {
  for (const view of all) {
    const linked = [view, ...view.linkedViews].filter((other) => other.table.unit[1] === view.table.unit[1]);
    const longest = Math.max(...linked.map((other) => other.table.span)) || 1;
    for (const other of linked.filter(({ span }) => span !== longest)) {
      const isWhole = other.view.t0 <= 0 && other.view.t1 >= other.span;
      other.span = longest;
      other.show(isWhole ? { t0: -Infinity, t1: Infinity } : {}, false, false);
    }
  }
}

export async function apply() {
  const own = ++question, all = [...views.values()].filter((view) => view.root.isConnected && !view.root.dataset.timed);
  if (!all.length) return say("");
  const active = all.indexOf(viewInUse()), asked = all.map(given);
  const { addresses, headline, problem, tables } = await post({ addresses: asked, active, ...texts });
  if (own !== question) return undefined;
  if (problem) return say(problem);
  const whole = all.filter(({ view, span }) => view.t0 <= 0 && view.t1 >= span);
  all.forEach((view, place) => {
    const { dataset } = view.root, table = tables[place];
    if (!table || dataset.address === addresses[place] || !view.root.isConnected || given(view) !== asked[place]) return; // the last: edited
    dataset.original = asked[place];
    view.replace(table, addresses[place]);
  });
  fitSpans(all);
  for (const view of whole) view.show({ t0: -Infinity, t1: Infinity }, false, false);
  for (const view of all) view.outlineBefore();
  const used = viewInUse(); // another one meanwhile, or edited
  if (used && used === all[active] && used.root.dataset.address === addresses[active]) dock.headline(addresses[active], headline);
  return say(addresses.every(Boolean) ? "" : "The server no longer has some of these lanes, which stay as they were. Reload the page.");
}

/* Called with the two texts: by Dash, and whenever one changes. */
export function underScenario(_, times, workers) {
  const before = JSON.stringify(texts), told = { times: times || "", workers: workers || "" }, at = sent.indexOf(told.times);
  sent.splice(0, at + 1);
  if (told.times !== seen.times && at < 0 && !telling) texts.times = told.times; // no echo, and nothing newer is on its way
  if (told.workers !== seen.workers) texts.workers = told.workers;
  Object.assign(seen, told);
  fill();
  if (JSON.stringify(texts) !== before) apply().catch((error) => say(error.message)); else drawBanner("");
  return window.dash_clientside.no_update;
}

/* Called with the failed workers before and after a press, once these have a plan, and with those that the page has by then. */
export function takePress(_, [before, after], now) {
  const { no_update } = window.dash_clientside;
  return (now || "") === before ? [after, "plans"] : [no_update, no_update];
}

/* Set the times: the lanes follow at once, tables and the address a moment after the last of several quick changes. The address
   has the first change at once, because the reader may leave this step of the browser's history. */
export function setTimes(value) {
  texts.times = value;
  changes++;
  if (!telling) writeTimes(value);
  fill();
  apply().catch((error) => say(error.message));
  clearTimeout(telling);
  telling = setTimeout(() => { telling = null; sent.push(value); setProps("times", { value }); }, WAIT);
}

function writeTimes(value) {
  const query = readAddress();
  if (value) query.set("times", value); else query.delete("times");
  writeAddress(query);
}

/* The address has the times: they replace those that are yet to be told. */
window.addEventListener("popstate", () => {
  clearTimeout(telling);
  telling = null;
  seen.times = texts.times;
});

function drawBanner(problem) {
  const banner = document.querySelector(".banner");
  if (!banner) return;
  const { file, ...own } = fields(), words = Object.entries(own).map(([name, value]) => `${name} = ${value}`);
  if (file) words.unshift(names || "times of a file");
  if (texts.workers) words.push(texts.workers);
  const reset = element("button", { type: "button", className: "quiet", onclick: () => { setTimes(""); setProps("fail", { value: "" }); } }, "Reset");
  banner.hidden = isGiven();
  banner.replaceChildren(element("strong", {}, "Scenario: "), words.join(", "), problem ? element("span", { className: "status" }, problem) : "", reset);
}

/* Build the form, and set its fields to the scenario. */
function fill() {
  const own = fields();
  for (const form of document.querySelectorAll(".retime")) {
    if (!form.firstChild) build(form);
    for (const label of form.querySelectorAll("[data-field]")) {
      const [text, slider] = label.querySelectorAll("input"), value = own[label.dataset.field] || "";
      if (text !== document.activeElement) text.value = value;
      if (slider !== document.activeElement) slider.value = value || label.dataset.given || 0;
    }
  }
}

function build(form) {
  const all = JSON.parse(form.dataset.fields), numbers = all.map(({ given }) => Number(given) || 0), most = 4 * Math.max(...numbers, 1);
  form.append(...all.map(({ name, title, given }) => {
    const label = element("label", {}, element("span", {}, title), element("input", { type: "text", placeholder: given || "as given", autocomplete: "off", spellcheck: false }),
      element("input", { type: "range", min: 0, max: name === "limit" ? 16 : most, step: (name === "limit" ? 16 : most) / STEPS, ariaLabel: `${title}, slider` }));
    Object.assign(label.dataset, { field: name, given, most: String(most) });
    return label;
  }));
  const press = (text, onclick) => element("button", { type: "button", className: "quiet", onclick }, text);
  const choose = () => { const input = element("input", { type: "file", accept: ".json,.toml", onchange: () => take(input.files[0]) }); input.click(); };
  form.append(element("div", { className: "retime-buttons" }, press("As given", () => setTimes("")), press("Profile or job …", choose)), element("div", { className: "status retime-message", role: "status" }));
}

/* All timelines in sight, for curves: [title, address as given]. */
const timelines = () => [...document.querySelectorAll(".lanes-view, .lanes-spark")].filter(inSight)
  .map(({ dataset, ariaLabel }) => [dataset.title || ariaLabel || dataset.name, dataset.original || dataset.address]);

function curve(label) {
  const { field, most } = label.dataset;
  if (field !== "limit") setProps("curve", { data: { field, most: Number(most), timelines: timelines() } });
}

function typed(form, event) {
  const label = event.target.closest("[data-field]");
  if (!label) return;
  const value = event.target.value.trim().replace(/[\s,]+/g, ","), own = { ...fields(), [label.dataset.field]: value };
  if (event.target.type === "range") curve(label);
  setTimes(Object.entries(own).filter(([, text]) => text !== "").map((pair) => pair.join("=")).join(" "));
}

async function take(file) {
  const most = Number(document.querySelector(".retime").dataset.fileBytes) / 2;
  if (!file) return;
  if (file.size > most) { say(`${file.name} is too large for the page (at most ${most / 2 ** 20} MB): use recycle view --profile.`); return; }
  const own = ++changes, { digest } = await post({ file: [file.name, await file.text()] });
  if (own !== changes) return; // later times were chosen meanwhile
  names = `times of ${file.name}`;
  setTimes(`file=${digest}`);
}

const ACTIONS = {
  input: typed,
  focusin: (_, { target }) => { const label = target.closest("[data-field]"); if (label) curve(label); },
  dragover: (_, event) => event.preventDefault(),
  drop: (_, event) => { event.preventDefault(); take(event.dataTransfer.files[0]); },
};
for (const [name, act] of Object.entries(ACTIONS)) on(name, ".retime", act);
whenChanged(() => { if (document.querySelector(".retime:empty")) { fill(); drawBanner(""); } });
