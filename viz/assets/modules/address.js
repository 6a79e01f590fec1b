/* Controls whose value stands in the page's address: restored from it when the page opens, written to it when changed. */
import { readAddress, setProps, writeAddress } from "viz/page.js";
const kept = new Map(); // identifier -> {first, choices}: its value before any address said another, and what it may be

/* Values that tabs, options by value, or options by name allow. */
const values = (choices) => (Array.isArray(choices) ? choices.map((one) => one.props?.value ?? one.value ?? one) : Object.keys(choices));
const written = (value) => (Array.isArray(value) ? value.join(",") : String(value));

/* The value that the address says for a control, `first` where it says none that is allowed: any text, or whole numbers
   without choices. */
function stated(query, id, { first, choices }) {
  const text = query.get(id);
  if (text === null || choices === "text") return text ?? first;
  if (!choices) return Number.isInteger(Number(text)) ? Number(text) : first;
  const named = Array.isArray(first) ? text.split(",").filter(Boolean) : [text];
  if (!named.every((one) => values(choices).includes(one))) return first;
  return Array.isArray(first) ? named : text;
}

/* What moves by itself leaves no steps behind: a run that is played or followed. */
const isMoving = () => document.querySelector(".player .playing, .following input:checked") !== null;

window.addEventListener("popstate", () => {
  const query = readAddress();
  for (const [id, control] of kept) {
    if (document.getElementById(id)) setProps(id, { value: stated(query, id, control) });
  }
});

/* What the control should hold: what the address says at first, then what it holds. */
export function keepInAddress({ outputs_list: { id } }, value, choices) {
  const query = readAddress(), { no_update } = window.dash_clientside;
  if (!kept.has(id)) {
    kept.set(id, { first: value, choices });
    const wanted = stated(query, id, kept.get(id));
    if (id === "fail" && wanted && !query.has("pages")) setProps("pages", { value: "plans" });
    return written(wanted) !== written(value) ? wanted : no_update;
  }
  kept.get(id).choices = choices;
  const isStep = (query.get(id) ?? written(kept.get(id).first)) !== written(value) && !isMoving();
  if (choices === "text" && !value) query.delete(id); else query.set(id, written(value));
  writeAddress(query, isStep);
  return no_update;
}
