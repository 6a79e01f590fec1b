import assert from "node:assert";
import { test } from "node:test";
import { earliest, searchTable } from "viz/search.js";
import { names, read } from "./tables.mjs";

const table = read("broken");
table.unit = [1, ""];

const FOUND = {
  "kind:W": "0W1.0 1W1.0 1W1.1",
  "kind:w mb:1.0": "0W1.0 1W1.0",
  "kind:W stage:1 mb:1.1": "1W1.1",
  "kind:I,W stage:0": "0I1.0 0W1.0",
  "kind:F mb:1 worker:0.*": "0F0.1 1F0.1",
  "kind:F worker:*.1 -is:rerouted mb:*.0": "1F0.0 1F2.0",
  "is:rerouted kind:F": "1F1.0 1F1.1",
  "kind:step": "0STEP 0STEP 0STEP 1STEP 1STEP",
  "kind:F mb:0..0 stage:0..0 pipeline:1..2": "0F1.0 0F2.0",
  "dur>1.5 stage=0 pipeline:2": "0B2.0 0B2.1",
  "kind:F start<0.5": "0F0.0 0F1.0 0F2.0",
  "1W1": "1W1.0 1W1.1",
  "-kind:backward -kind:reduce -kind:step -mb:1": "0F0.0 0F1.0 0F2.0 1F0.0 1F1.0 1F2.0",
  "end>=9 dur=1": "0W1.0 1W1.0 1W1.1",
  "dur<=1 kind:b,i": "0I1.0 1I1.0 1I1.1",
  "kind:comm": "",
  "kind:pair": "",
  "is:critical start>3": "0B0.1 1B0.1 1F0.1 1I1.0",
};
for (const [query, found] of Object.entries(FOUND)) {
  test(query, () => assert.equal(names(table, searchTable(table, query)).sort().join(" "), found));
}

const MISTAKES = {
  "knd:W": "knd:w: knd is not a field; known are kind, mb, stage",
  "kind:Q": "q is not a kind; known are f, b",
  "kind:W kind:": "a value is missing after kind:",
  "dur:3": "dur is compared as dur>1",
  "mb>3": "mb takes values as mb:…",
  "dur>x": "x is not a number",
  "mb:1.2.3": "is not a micro-batch; write mb:1.3",
  "worker:7": "is not a worker; write worker:1.2",
  "stage:a": "a is not a number; write stage:2 or stage:2..5",
  "is:red": "red is not a mark; known are rerouted, critical, violation",
  ">5": "write field:value",
  [`${"f ".repeat(41)}`]: "at most 40 terms and 1000 characters",
};
for (const [query, message] of Object.entries(MISTAKES)) {
  test(`${query} is refused`, () => assert.throws(() => searchTable(table, query), (error) => error.message.includes(message) && !error.message.includes("\n")));
}

test("nothing is searched for", () => assert.equal(searchTable(table, ""), null));

test("times are those of the axis, alike to a millionth", () => {
  const late = Object.assign(Object.create(table), { start: table.start.map((t) => t + 0.1), end: table.end.map((t) => t + 0.1), unit: [1000, "ms"] });
  assert.deepEqual(names(late, searchTable(late, "dur=2000 stage:0 mb:2.0")), ["0B2.0"]);
});

test("the first are those by time", () => {
  const first = earliest(table, searchTable(table, "kind:F"), 5);
  assert.deepEqual(first.map((i) => table.start[i]), [0, 0, 0, 1, 1]);
});
