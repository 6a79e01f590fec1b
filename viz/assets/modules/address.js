/* Controls whose value is kept in the page's address: read when the page opens, written when the value changes. */
import { writeNow } from "viz/link.js";
import { readAddress, setProps, writeAddress } from "viz/page.js";
const controls = new Map(); // identifier -> {first, choices}: its initial value and the allowed values

/* Values of tabs, of options by value, or of options by name. */
const values = (choices) => (Array.isArray(choices) ? choices.map((option) => option.props?.value ?? option.value ?? option) : Object.keys(choices));
const asText = (value) => (Array.isArray(value) ? value.join(",") : String(value));

/* The value of a control in the address, or `first` if it is missing or not allowed. Without choices: any text if `first` is
   text, else whole numbers. */
function valueInAddress(query, id, { first, choices }) {
  const text = query.get(id);
  if (text === null) return first;
  if (!choices && typeof first === "string") return text;
  if (!choices) return Number.isInteger(Number(text)) ? Number(text) : first;
  const named = Array.isArray(first) ? text.split(",").filter(Boolean) : [text];
  if (!named.every((option) => values(choices).includes(option))) return first;
  return Array.isArray(first) ? named : text;
}

/* Steps of a run that is played or followed do not enter the history. */
const isMoving = () => document.querySelector(".playing, .following input:checked") !== null;

window.addEventListener("popstate", () => {
  const query = readAddress();
  for (const [id, control] of controls) {
    if (document.getElementById(id)) setProps(id, { value: valueInAddress(query, id, control) });
  }
});

/* The present value of a control. */
export const valueOf = (id) => controls.get(id)?.now;

/* The value to set: from the address at first, later none. */
export function keepInAddress({ outputs_list: { id } }, value, choices) {
  writeNow(); // a selection just before is an earlier step
  const query = readAddress(), { no_update } = window.dash_clientside;
  if (asText(window.dash_component_api.getLayout(id)?.props.value) !== asText(value)) return no_update; // called again for a later value
  if (!controls.has(id)) {
    controls.set(id, { first: value, choices });
    const initial = controls.get(id).now = valueInAddress(query, id, controls.get(id));
    if (id === "fail" && initial && !query.has("pages") && document.querySelector('.mode[data-page="plans"]')) setProps("pages", { value: "plans" });
    return asText(initial) !== asText(value) ? initial : no_update;
  }
  Object.assign(controls.get(id), { choices, now: value });
  const isStep = (query.get(id) ?? asText(controls.get(id).first)) !== asText(value) && !/^times$|-(follow|attempt)$/.test(id) && !isMoving();
  if (value === "") query.delete(id); else query.set(id, asText(value));
  writeAddress(query, isStep);
  return no_update;
}
