/* Other times for the current timeline: fields, a profile or a job go to the server, and the new lanes replace the shown ones.
   Answers to outdated questions are dropped. */
import { dock } from "viz/dock.js";
import { element, setProps, viewInUse } from "viz/page.js";
import { fetchTable } from "viz/table.js";
let question = 0;

/* Draw an address's lanes in other times; returns {address} or {problem}. */
async function ask(view, address, values) {
  const own = ++question, body = JSON.stringify(values), headers = { "Content-Type": "application/json" };
  const answer = await fetch(address.replace("lanes/", "retime/"), { method: "POST", headers, body });
  const result = answer.ok ? await answer.json() : { problem: "These lanes are no longer cached. Reload the page." };
  const table = own === question && !result.problem && await fetchTable(result.address);
  if (own !== question || !view.root.isConnected) return {};
  if (!table) return result;
  view.replace(table, result.address);
  dock.headline(result.address, result.headline);
  return result;
}

/* Apply times (field -> text) to a view; resolves to an error text or "". */
export async function retime(view, values) {
  const { dataset } = view.root, original = dataset.original || dataset.address, { address, problem } = await ask(view, original, values);
  if (!address) return problem || "";
  dataset.original = original;
  view.times = address === original ? null : values;
  return "";
}

/* Apply the times of a file; later fields change these, until "As given". */
async function retimeBy(view, file, most) {
  if (file.size > most / 2) return `${file.name} is too large for the page (at most ${most / 2 ** 21} MB): use recycle view --profile.`;
  const { dataset } = view.root, given = dataset.given || dataset.original || dataset.address;
  const { address, problem } = await ask(view, given, { file: [file.name, await file.text()] });
  if (!address) return problem || "";
  Object.assign(dataset, { given, original: address });
  view.times = null;
  dock.tell();
  return `Times of ${file.name}, which links do not include.`;
}

/* Show the result in the form, or below the lanes if the form is gone. */
function tell(form, view, answer) {
  const say = (text) => { if (form.isConnected) form.querySelector(".retime-message").textContent = text; else view.announce(text); };
  return answer.then(say, (error) => say(error.message));
}

/* One question at a time; input during a question is sent after its answer. */
async function send(form) {
  if (form.asks) { form.asksAgain = true; return; }
  const view = viewInUse(), fields = [...form.querySelectorAll("[data-field]")].map((label) => [label.dataset, label.querySelector("input").value]);
  if (!view || view.table.toServer) return;
  form.asks = true;
  const changed = fields.filter(([{ given }, value]) => value.trim() !== given);
  await tell(form, view, retime(view, Object.fromEntries(changed.map(([{ field }, value]) => [field, value]))));
  form.asks = false;
  if (form.asksAgain) { form.asksAgain = false; send(form); }
}

function take(form, file) {
  const view = viewInUse();
  if (view && file) tell(form, view, retimeBy(view, file, Number(form.querySelector("[data-retime-file]").dataset.retimeFile)));
}

function reset(form) {
  const view = viewInUse();
  for (const { dataset: { field, given: value } } of form.querySelectorAll("[data-field]")) setProps({ type: "retime", field }, { value });
  if (!view) return;
  const { dataset } = view.root;
  dataset.original = dataset.given || dataset.original || dataset.address;
  delete dataset.given;
  tell(form, view, retime(view, {}));
}

function choose(form) {
  const input = element("input", { type: "file", accept: ".json,.toml", onchange: () => take(form, input.files[0]) });
  input.click();
}

const ACTIONS = {
  input: (form) => send(form),
  dragover: (_, event) => event.preventDefault(),
  drop: (form, event) => { event.preventDefault(); take(form, event.dataTransfer.files[0]); },
  click: (form, { target }) => { if (target.closest("[data-retime-reset]")) reset(form); else if (target.closest("[data-retime-file]")) choose(form); },
};
for (const [name, act] of Object.entries(ACTIONS)) {
  document.addEventListener(name, (event) => { const form = event.target.closest?.(".retime"); if (form) act(form, event); });
}
