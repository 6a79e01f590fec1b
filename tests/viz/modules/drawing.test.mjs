import assert from "node:assert";
import { test } from "node:test";
import { Raster, Shares, bandRows, colourWord } from "viz/raster.js";
import { Rows } from "viz/rows.js";
import { tickStep } from "viz/axes.js";
import { read } from "./tables.mjs";

globalThis.ImageData = class { constructor(width, height) { Object.assign(this, { width, height, data: new Uint8ClampedArray(4 * width * height) }); } };

test("shares of time are exact", () => {
  const table = read("many"), rows = new Rows(table, "pipeline", new Set());
  for (const columns of [7, 100, 1000]) {
    const shares = new Shares(table, columns), found = shares.of(rows, 0, rows.count, 0, columns / table.span);
    const spent = table.busy.map((_, paint) => found.subarray(paint * shares.stride, paint * shares.stride + columns).reduce((sum, share) => sum + share, 0));
    const seconds = spent.map((sum) => (sum * table.span * table.lanes) / columns);
    for (const [paint, expected] of [1024, 1024, 1024, 0, 0].entries()) assert.ok(Math.abs(seconds[paint] - expected) < 1e-3 * 1024, `${columns}: ${seconds}`);
  }
});

test("bands keep to groups and are high enough", () => {
  const rows = new Rows(read("many"), "pipeline", new Set());
  assert.deepEqual(bandRows(rows, 3), Array.from({ length: 17 }, (_, at) => 4 * at));
  assert.deepEqual(bandRows(rows, 0.5), [0, 12, 24, 36, 48, 60, 64]);
});

test("stacks have the area of their shares", () => {
  const raster = new Raster(1, 10), colours = [colourWord("#FF0000"), colourWord("#00FF00")];
  raster.words.fill(colourWord("#000000"));
  raster.stack(0, 0, 10, [0.25, 0.5], colours, 1, 0);
  const sum = (channel) => raster.image.data.filter((_, i) => i % 4 === channel).reduce((total, value) => total + value, 0) / 2550;
  assert.ok(Math.abs(sum(0) - 0.25) < 0.01 && Math.abs(sum(1) - 0.5) < 0.01, `${sum(0)} ${sum(1)}`);
});

test("ticks are round", () => assert.deepEqual([tickStep(11, 800), tickStep(27, 800), tickStep(1, 800), tickStep(1023, 300)], [2, 5, 0.2, 500]));

test("workers that do the same at the same times share a row", () => {
  const whole = read("whole"), rows = new Rows(whole, "alike", new Set());
  assert.deepEqual([rows.count, rows.size(0), rows.size(1), rows.lane(0), rows.lane(1)], [2, 3, 3, 0, 1]);
  assert.deepEqual([...rows.rowOf], [0, 1, 0, 1, 0, 1]);
  whole.start[whole.offsets[2]] += 0.5; // 1.0 starts later than its peers
  const others = new Rows(whole, "alike", new Set());
  assert.deepEqual([others.count, others.rowOf[0] === others.rowOf[4], others.rowOf[2]], [3, true, 2]);
});
