/* Accessibility that Dash's components lack: roles and keys of tabs, names of a slider's field and of the file field, keys of
   the file field and of lists. A file above the limit of an upload is reported, because Dash ignores it silently. */
import { dock } from "viz/dock.js";
import { setAttributes, setProps, whenChanged } from "viz/page.js";
const tabs = () => [...document.querySelectorAll(".tab")];

function describe() {
  for (const tab of tabs()) {
    setAttributes(tab, { role: "tab", "aria-selected": String(tab.classList.contains("tab--selected")), tabindex: "0" });
    setAttributes(tab.parentElement, { role: "tablist" });
  }
  for (const field of document.querySelectorAll(".dash-slider-container input, .step input")) {
    if (!field.labels?.length) setAttributes(field, { "aria-label": "Step" });
  }
  for (const place of document.querySelectorAll(".drop")) {
    setAttributes(place, { role: "button", tabindex: "0" });
    const field = place.querySelector("input[type=file]") || place.parentElement.querySelector("input[type=file]");
    if (field) setAttributes(field, { "aria-label": "Schedule file", tabindex: "-1" });
  }
  for (const list of document.querySelectorAll("button.dash-dropdown")) setAttributes(list, { tabindex: "0" });
}

whenChanged(describe, ["class"]);

document.addEventListener("keydown", (event) => {
  const { target, key } = event, isPress = key === "Enter" || key === " ";
  const all = tabs(), at = all.indexOf(target), step = { ArrowLeft: -1, ArrowRight: 1 }[key];
  if (isPress && (at >= 0 || target.matches?.(".drop"))) target.click();
  else if (at >= 0 && step) all[(at + step + all.length) % all.length].focus();
  else return;
  event.preventDefault();
  event.stopPropagation();
}, true);

/* Report a file above the limit; it is never sent. */
function look(event) {
  const row = event.target.closest?.("[data-most]"), [file] = (event.type === "drop" ? event.dataTransfer : event.target).files || [];
  if (!row || !file) return;
  const most = Number(row.dataset.most), size = Math.ceil(file.size / 2 ** 20);
  if (file.size <= most) { dock.open("findings"); return; }
  const children = `${file.name}: ${size} MB is too large for the page (at most ${Math.floor(most / 2 ** 20)} MB): use recycle check`;
  setProps(row.querySelector("[role=status]").id, { children, className: "status" });
}
for (const event of ["drop", "change"]) document.addEventListener(event, look, true);
