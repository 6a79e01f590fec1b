/* Notes of whoever looks: a line of text at a place of the lanes. They stand in the address, so that a link shows them to
   others, and nowhere else. */
import { drawTag } from "viz/draw.js";
import { remember } from "viz/link.js";
import { element } from "viz/page.js";
const LONGEST = 200, MOST = 20, NEAR = 1e-6;

const at = (view, note) => (other) => other.lane === note.lane && Math.abs(other.t - note.t) <= NEAR * view.span;

/* Lane and time of what is selected, null where nothing is. */
function place(view) {
  if (view.gap) return { lane: view.gap.lane, t: view.gap.from };
  return view.selected < 0 ? null : { lane: view.table.laneOf(view.selected), t: view.table.start[view.selected] };
}

/* Put a note at a place, or with no text take it away. */
export function putNote(view, note) {
  const others = view.notes.filter((one) => !at(view, note)(one)), text = note.text.trim().slice(0, LONGEST);
  view.notes = (text ? [...others, { ...note, text }] : others).slice(-MOST);
  remember(view);
  view.redraw();
}

export function writeNote(view) {
  const here = place(view);
  if (!here) return view.announce("Select an instruction or a gap first: a note belongs to it.");
  const field = element("input", { value: view.notes.find(at(view, here))?.text || "", maxLength: LONGEST, ariaLabel: "Note", size: 48 });
  const form = element("form", { method: "dialog" }, element("h2", {}, "Note"), field, " ", element("button", { value: "keep" }, "Keep"), " ", element("button", { value: "" }, "Cancel"));
  const dialog = element("dialog", { className: "lanes-help lanes-note" }, form);
  dialog.addEventListener("close", () => {
    dialog.remove();
    if (dialog.returnValue === "keep") putNote(view, { ...here, text: field.value });
    view.root.focus();
  });
  document.body.append(dialog);
  dialog.showModal();
  field.focus();
  return undefined;
}

const short = (value) => +value.toPrecision(9);
export const notesAsText = (view) => (view.notes.length ? JSON.stringify(view.notes.map(({ lane, t, text }) => [lane, short(t), text])) : "");

/* The notes of an address; whatever is none of this table is left out. */
export function notesOf(view, text) {
  let read = [];
  try { read = JSON.parse(text || "[]"); } catch { /* an address that was cut off */ }
  const isNote = (one) => Array.isArray(one) && Number.isInteger(one[0]) && one[0] >= 0 && one[0] < view.table.lanes && Number.isFinite(one[1]) && typeof one[2] === "string";
  return (Array.isArray(read) ? read : []).filter(isNote).slice(0, MOST).map(([lane, t, note]) => ({ lane, t, text: note.slice(0, LONGEST) }));
}

/* A flag with the text at each place in view. */
export function drawNotes(picture, context, { notes, theme, rows }) {
  const { view, perTime, perRow, ratio, width } = picture, size = 12 * ratio;
  for (const { lane, t, text } of notes) {
    const x = (t - view.t0) * perTime, y = (rows.rowOf[lane] - view.y0) * perRow, top = Math.max(0, y - 0.4 * size);
    if (x < 0 || x > width || y < -perRow || y > picture.height) continue;
    context.fillStyle = theme.ink;
    context.fillRect(x - ratio, top, 2 * ratio, Math.max(perRow, 1.5 * size));
    drawTag(context, text, theme.ink, theme.paper, { size, font: theme.font, left: (wide) => Math.min(x, width - wide), top });
  }
}
