import assert from "node:assert";
import { test } from "node:test";
import { Rows } from "viz/rows.js";
import { find, names, read } from "./tables.mjs";

const table = read("broken");
table.unit = [1, ""];
const labels = (rows) => [...rows.order].map((lane) => table.labels[lane]);

test("operations are found by time and height", () => {
  assert.equal(table.instruction(table.at(1, 2.5, 0)), "1F1.0");
  assert.equal(table.at(0, 4, 0), -1);
  assert.equal(table.at(1, 2.5, 0.49), -1);
  assert.equal(table.laneOf(table.at(5, 2.5, 0)), 5);
});

test("gaps lie between work", () => {
  assert.deepEqual(table.gapAt(0, 4), [2, 5]);
  assert.equal(table.gapAt(0, 1), null);
  assert.deepEqual(table.gapAt(3, 4), [0, 11]);
});

test("an operation is labelled and described", () => {
  const away = find(table, "1F1.0");
  assert.equal(table.label(away), "F1.0");
  assert.deepEqual(table.describe(away, 1).slice(0, 5), ["1F1.0", "forward", "worker 0.1, stage 1", "start 2, end 3, takes 1", "home pipeline 1, re-routed to this peer"]);
  assert.equal(table.label(find(table, "0F0.1")), "F1");
});

test("the busy share of a lane", () => assert.equal(table.busyShare[1].toFixed(3), (9 / 11).toFixed(3)));

test("rows by stage, folded and pinned", () => {
  assert.deepEqual(labels(new Rows(table, "stage", new Set())), ["0.0", "1.0", "2.0", "0.1", "1.1", "2.1"]);
  const folded = new Rows(table, "stage", new Set([0, 1]));
  assert.deepEqual([folded.count, folded.lane(0), folded.groupAt(1).size], [2, -1, 3]);
  const pinned = new Rows(table, "pipeline", new Set(), [4, 1]);
  assert.deepEqual(labels(pinned), ["2.0", "0.1", "0.0", "1.0", "1.1", "2.1"]);
  assert.deepEqual([pinned.groups[0].name, pinned.groups[0].size, pinned.rowOf[4]], ["pinned", 2, 0]);
});

test("what comes next in a lane", () => {
  const first = table.offsets[0];
  assert.deepEqual(names(table, [table.next(first, 1), table.next(first, 1, (i) => table.kinds[table.kind[i]].token === "B")]), ["0F0.1", "0B0.0"]);
  assert.equal(table.next(first, -1), -1);
});
