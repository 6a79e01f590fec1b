import assert from "node:assert";
import { test } from "node:test";

test("all modules load and Dash's functions are there", async () => {
  const { callbacks } = await import("viz/main.js");
  assert.deepEqual(Object.keys(callbacks), ["arrows", "followNewest", "keepInAddress", "markPicked", "openStep", "showMode", "takePress", "underScenario"]);
});
