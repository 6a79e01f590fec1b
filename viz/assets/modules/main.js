/* Functions for Dash (see clientside.js), consoles, tests and pages without a server. */
import { keepInAddress } from "viz/address.js";
import "viz/components.js";
import "viz/keys.js";
import "viz/lost.js";
import { showMode } from "viz/modes.js";
import { element, state, views } from "viz/page.js";
import { followNewest, openStep } from "viz/player.js";
import { earliest, searchTable } from "viz/search.js";
import { arrows } from "viz/selection.js";
import { fetchTable } from "viz/table.js";
import { markPicked } from "viz/scoreboard.js";
import { takePress, underScenario } from "viz/scenario.js";
import { useView } from "viz/dock.js";
import { attachAll } from "viz/view.js";

export const callbacks = { arrows, followNewest, keepInAddress, markPicked, openStep, showMode, takePress, underScenario };
window.recycle = {
  views, element, table: fetchTable, search: searchTable, earliest, use: useView,
  get active() { return state.active; }, set active(view) { state.active = view; },
};
attachAll(); // views that exist already
