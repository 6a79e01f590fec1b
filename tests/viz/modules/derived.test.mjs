import assert from "node:assert";
import { test } from "node:test";
import { tableOf } from "viz/derived.js";
import { fetchTable } from "viz/table.js";
import { find, read } from "./tables.mjs";

const whole = read("whole"), broken = read("broken");
for (const table of [whole, broken]) table.unit = [1, ""];
fetchTable("whole", () => whole);
fetchTable("broken", () => broken);
const deltas = Float32Array.from(broken.kind, (_, i) => ({ "1F1.0": 1, "1W1.0": 6, "0W1.0": NaN })[broken.instruction(i)] ?? 0);
globalThis.fetch = async () => ({ ok: true, arrayBuffer: async () => deltas.buffer });
const paints = Array.from({ length: 6 }, (_, place) => ({ name: String(place), fill: "#000000" }));
const how = { address: "shades/x.bin", edges: [0.1, 3], title: "whole", name: "broken", paints, is_shaded: true };

test("labels and lines say how much later work starts", async () => {
  const made = await tableOf({ dataset: { address: "broken", shades: JSON.stringify([how]) } });
  const told = (text) => [made.label(find(made, text)), made.describe(find(made, text), 1).at(-1)];
  assert.deepEqual(told("0F0.0"), ["F0", "starts as in whole"]);
  assert.deepEqual(told("1F1.0"), ["F1.0›", "starts 1 later than in whole"]);
  assert.deepEqual(told("1W1.0"), ["W1.0»", "starts 6 later than in whole"]);
  assert.deepEqual(told("0W1.0"), ["W0*", "not in whole"]);
  assert.deepEqual([made.compared[0].low, made.compared[0].high], [0, 6]);
});

test("kinds keep their colours where they are asked for", async () => {
  const made = await tableOf({ dataset: { address: "broken", shades: JSON.stringify([{ ...how, is_shaded: false }]) } });
  assert.equal(made.label(find(made, "1F1.0")), "F1.0");
  assert.equal(made.paints, broken.paints);
  assert.equal(made.compared[0].high, 6);
});

test("lanes under each other keep their operations, and the server hears of the right ones", async () => {
  const made = await tableOf({ dataset: { address: "whole", with: '["broken"]', shades: JSON.stringify([null, how]) } });
  assert.deepEqual(made.labels.slice(0, 4), ["0.0 A", "0.0 B", "0.1 A", "0.1 B"]);
  assert.deepEqual([made.length, made.span, made.failed], [whole.length + broken.length, 11, [7]]);
  assert.deepEqual([...made.busyShare.slice(0, 2)], [whole.busyShare[0], broken.busyShare[0]]); // each of its own span
  const operation = made.offsets[3] + 1, chosen = made.toServer({ operation });
  assert.equal(made.instruction(operation), "1F1.0");
  assert.deepEqual([chosen.address, broken.instruction(chosen.operation)], ["broken", "1F1.0"]);
  assert.deepEqual(made.toServer({ lane: 3, from: 0, to: 1 }), { lane: 1, from: 0, to: 1, address: "broken" });
  const links = made.fromServer({ address: "broken", operation: chosen.operation, inputs: [0], outputs: [], waited: -1 });
  assert.deepEqual([links.operation, made.labels[made.laneOf(links.inputs[0])], links.waited], [operation, "0.0 B", -1]);
  assert.equal(made.fromServer({ address: "another" }), null);
  const held = made.gather([whole.start, broken.start]);
  assert.deepEqual([...held], [...made.start]);
});
