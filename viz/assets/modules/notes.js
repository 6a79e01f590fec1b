/* Notes: lines of text at places of the lanes, kept only in the address, so that links share them. */
import { drawTag } from "viz/draw.js";
import { remember } from "viz/link.js";
import { element } from "viz/page.js";
const LONGEST = 200, MAX_NOTES = 20, NEAR = 1e-6;

const at = (view, note) => (other) => other.lane === note.lane && Math.abs(other.t - note.t) <= NEAR * view.span;

/* Set the note of a place; without text remove it. */
export function putNote(view, note) {
  const others = view.notes.filter((other) => !at(view, note)(other)), text = note.text.trim().slice(0, LONGEST);
  view.notes = (text ? [...others, { ...note, text }] : others).slice(-MAX_NOTES);
  remember(view);
  view.redraw();
}

export function writeNote(view) {
  const selectedPlace = { lane: view.chosenLane, t: view.gap ? view.gap.from : view.table.start[view.selected] };
  if (view.chosenLane < 0) { view.announce("Select an instruction or a gap first: a note belongs to it."); return; }
  const field = element("input", { value: view.notes.find(at(view, selectedPlace))?.text || "", maxLength: LONGEST, ariaLabel: "Note", size: 48 });
  const form = element("form", { method: "dialog" }, element("h2", {}, "Note"), field, " ", element("button", { value: "keep" }, "Keep"), " ", element("button", { value: "" }, "Cancel"));
  const dialog = element("dialog", { className: "lanes-help lanes-note" }, form);
  dialog.addEventListener("close", () => {
    dialog.remove();
    if (dialog.returnValue === "keep") putNote(view, { ...selectedPlace, text: field.value });
    view.root.focus();
  });
  document.body.append(dialog);
  dialog.showModal();
  field.focus();
}

const short = (value) => +value.toPrecision(9);
export const notesAsText = (view) => (view.notes.length ? JSON.stringify(view.notes.map(({ lane, t, text }) => [lane, short(t), text])) : "");

/* The notes of an address; invalid ones are ignored. */
export function notesOf(view, text) {
  let read = [];
  try { read = JSON.parse(text || "[]"); } catch { /* a truncated address */ }
  const isNote = (other) => Array.isArray(other) && Number.isInteger(other[0]) && other[0] >= 0 && other[0] < view.table.lanes && Number.isFinite(other[1]) && typeof other[2] === "string";
  return (Array.isArray(read) ? read : []).filter(isNote).slice(0, MAX_NOTES).map(([lane, t, note]) => ({ lane, t, text: note.slice(0, LONGEST) }));
}

/* A flag with the text at each visible place. */
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
