/* What components of Dash leave out for those who hear a page or have no pointer: names of a slider's field and of the place
   that takes files, and keys for the latter and for lists to choose from. */
(() => {
  "use strict";
  const set = (node, name, value) => { if (node.getAttribute(name) !== value) node.setAttribute(name, value); };

  function describe() {
    for (const field of document.querySelectorAll(".dash-slider-container input, .step input")) {
      if (!field.labels?.length) set(field, "aria-label", "Step");
    }
    for (const place of document.querySelectorAll(".drop")) {
      set(place, "role", "button");
      set(place, "tabindex", "0");
      const field = (place.matches("input") ? place : place.querySelector("input[type=file]")) || place.parentElement?.querySelector("input[type=file]");
      if (!field) continue;
      set(field, "aria-label", "Schedule file");
      set(field, "tabindex", "-1");
    }
    for (const list of document.querySelectorAll("button.dash-dropdown")) set(list, "tabindex", "0");
  }

  let looking = false;
  new MutationObserver(() => {
    if (looking) return;
    looking = true;
    requestAnimationFrame(() => { looking = false; describe(); });
  }).observe(document.documentElement, { childList: true, subtree: true });

  document.addEventListener("keydown", (event) => {
    if (!event.target.matches?.(".drop") || (event.key !== "Enter" && event.key !== " ")) return;
    event.preventDefault();
    event.stopPropagation();
    event.target.click();
  }, true);
})();
