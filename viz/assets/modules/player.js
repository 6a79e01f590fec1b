/* The player of a run: its buttons, keys and playback set the step; the reader's choice of a step or attempt ends following. */
import { valueOf } from "viz/address.js";
import { inSight, on, openPage, readAddress, setControls, setProps } from "viz/page.js";
const EACH = 1000; // milliseconds between two steps of the playback
const evaluated = new Map(), waiting = new Map(); // slider -> whether its newest step was; timer until lanes can follow
let playing = null;

const shown = () => [...document.querySelectorAll(".player")].find(inSight);

/* The step that a button leads to; the same at an end. */
function next({ dataset: { slider, changes } }, move) {
  const all = JSON.parse(changes), now = valueOf(slider) ?? all[0], isBefore = move.endsWith("before");
  if (move.startsWith("step")) return Math.min(Math.max(now + (isBefore ? -1 : 1), all[0]), all.at(-1));
  return (isBefore ? all.findLast((step) => step < now) : all.find((step) => step > now)) ?? now;
}

/* Whether lanes are on their way: another step would drop the answer. */
const isLoading = (slider) => Boolean(document.getElementById(slider.replace("step", "lanes"))?.dataset.dashIsLoading);

const stay = (root) => { if (root) setControls({ [root.dataset.follow]: [] }); };

function pause() {
  clearInterval(playing);
  playing = null;
  for (const button of document.querySelectorAll(".playing")) { button.className = ""; button.textContent = "Play"; }
}

function play(root) {
  if (playing) { pause(); return; }
  const button = root.querySelector("[data-go=play]"), { slider } = root.dataset;
  const tick = () => {
    if (isLoading(slider)) return;
    const value = root.isConnected && inSight(root) ? next(root, "step after") : valueOf(slider);
    if (value === valueOf(slider)) pause(); else setProps(slider, { value });
  };
  button.className = "playing";
  button.textContent = "Pause";
  playing = setInterval(tick, EACH);
}

/* `move`: of a button's `data-go`. */
export function go(move, root = shown()) {
  if (!root) return;
  stay(root);
  if (move === "play") play(root); else setProps(root.dataset.slider, { value: next(root, move) });
}

on("click", ".player [data-go]", (button) => go(button.dataset.go, button.closest(".player")));
on("click", ".player [data-step]", ({ dataset: { step } }) => { stay(shown()); setProps(shown().dataset.slider, { value: Number(step) }); });

/* Called with a press on a curve over time, and the page of its run. */
export function openStep(_, click, page) {
  const step = click?.points?.[0]?.customdata;
  if (step !== undefined) openPage(page, { [`${page}-follow`]: [], [`${page}-step`]: step });
  return window.dash_clientside.no_update;
}

/* Called with the newest step of a live run, and whether it was evaluated: its lanes stay as they are while both do. The address
   knows first that the reader has chosen a step: Dash gives older states. */
export function followNewest(context, told, follow) {
  const { outputs_list: { id: slider }, states_list: [{ id }] } = context, [newest, isEvaluated] = told, { no_update } = window.dash_clientside;
  clearTimeout(waiting.get(slider));
  if (isLoading(slider)) { waiting.set(slider, setTimeout(followNewest, EACH, context, told, follow)); return no_update; }
  const isOther = valueOf(slider) !== newest || (evaluated.get(slider) ?? isEvaluated) !== isEvaluated;
  evaluated.set(slider, isEvaluated);
  if (isOther && follow?.length && readAddress().get(id) !== "") setProps(slider, { value: newest });
  return no_update;
}

for (const name of ["pointerdown", "keydown"]) on(name, ".step, .attempts", () => stay(shown()));
