import assert from "node:assert";
import { test } from "node:test";
import { keepInAddress } from "viz/address.js";
import { notesAsText, notesOf } from "viz/notes.js";
import { views } from "viz/page.js";
import { setTimes, underScenario } from "viz/scenario.js";
import { read } from "./tables.mjs";

const ask = (id, search, value, choices, present = value) => {
  location.search = search;
  window.dash_component_api = { getLayout: () => ({ props: { value: present } }) };
  return keepInAddress({ outputs_list: { id } }, value, choices);
};

test("a control begins with what the address says, if it may", () => {
  assert.equal(ask("step", "?step=7", 4), 7);
  assert.equal(ask("bad-step", "?bad-step=x", 4), "no update");
  assert.equal(ask("colour", "?colour=kind", "later", { later: "", kind: "" }), "kind");
  assert.equal(ask("other", "?other=red", "later", { later: "", kind: "" }), "no update");
  assert.deepEqual(ask("chosen", "?chosen=file/1,file/0", ["file/0"], { "file/0": "", "file/1": "" }), ["file/1", "file/0"]);
  assert.equal(ask("text", "?text=anything", ""), "anything");
});

test("what it holds then is written, as a step that Back undoes", () => {
  const written = [];
  history.pushState = (_, __, address) => written.push(address);
  ask("kept", "", "first", { first: "", second: "" });
  assert.equal(ask("kept", "", "second", { first: "", second: "" }, "first"), "no update"); // a call for what it held before
  ask("kept", "", "second", { first: "", second: "" });
  assert.deepEqual(written, ["/?kept=second"]);
});

test("notes of an address that are none of the table are left out", () => {
  const view = { table: read("broken"), notes: [{ lane: 2, t: 1.5, text: "x" }] };
  assert.deepEqual(notesOf(view, notesAsText(view)), view.notes);
  for (const text of ["[[0,1],[99,1,\"x\"],7", "[[0,1],[99,1,\"x\"],7]", "", null]) assert.deepEqual(notesOf(view, text), []);
});

test("times that the reader has set stay while Dash tells what it knew before", ({ mock }) => {
  const asked = [], set = (times) => { setTimes(times); mock.timers.tick(1000); };
  mock.timers.enable({ apis: ["setTimeout"] });
  globalThis.fetch = (_, { body }) => { const { times, workers } = JSON.parse(body); asked.push([times, workers]); return new Promise(() => {}); };
  views.set("one", { root: { isConnected: true, dataset: { address: "lanes/1.bin" } } });
  set("F=2");
  underScenario(null, "F=2", "");
  set("F=3");
  underScenario(null, "F=2", "0.0=2"); // it does not know F=3 yet
  underScenario(null, "F=3", "0.0=2");
  underScenario(null, "F=2", ""); // Back
  views.delete("one");
  assert.deepEqual(asked, [["F=2", ""], ["F=3", ""], ["F=3", "0.0=2"], ["F=2", ""]]);
});
