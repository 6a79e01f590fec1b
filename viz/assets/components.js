/* What components of Dash leave out, for those who hear a page or have no pointer: tabs are plain boxes without keys (Tab
   reaches them here, arrows go along, Enter or space opens), a slider's field and the place that takes files have no name,
   the latter and lists to choose from no keys. And a file beyond an upload's limit, which never leaves the browser, is ignored
   without a word. */
window.dash_clientside = window.dash_clientside || {};
(() => {
  "use strict";
  const limits = new Map(); // identifier of an upload -> [bytes, identifier of the line that says that a file is beyond]
  const tabs = () => [...document.querySelectorAll(".tab")];
  const set = (node, name, value) => { if (node.getAttribute(name) !== value) node.setAttribute(name, value); };

  function describe() {
    for (const tab of tabs()) {
      set(tab, "role", "tab");
      set(tab, "aria-selected", String(tab.classList.contains("tab--selected")));
      set(tab, "tabindex", "0");
      set(tab.parentElement, "role", "tablist");
    }
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
  }).observe(document.documentElement, { childList: true, subtree: true, attributes: true, attributeFilter: ["class"] });

  document.addEventListener("keydown", (event) => {
    const { target, key } = event, isPress = key === "Enter" || key === " ";
    const all = tabs(), at = all.indexOf(target), step = { ArrowLeft: -1, ArrowRight: 1 }[key];
    if (isPress && (at >= 0 || target.matches?.(".drop"))) target.click();
    else if (at >= 0 && step) all[(at + step + all.length) % all.length].focus();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }, true);

  const look = (event) => {
    const files = event.type === "drop" ? event.dataTransfer.files : event.target.files, file = files && files[0];
    for (const [upload, [limit, message]] of limits) {
      if (!file || !event.target.closest(`[id="${upload}"]`)) continue;
      if (file.size <= limit) { window.recycle.dock.open("findings"); continue; }
      const size = `${Math.ceil(file.size / 2 ** 20)} MB`, most = `${Math.floor(limit / 2 ** 20)} MB`;
      const children = `${file.name}: ${size} is too large for the page (at most ${most}): use recycle check`;
      window.dash_clientside.set_props(message, { children, className: "status" });
    }
  };
  for (const event of ["drop", "change"]) document.addEventListener(event, look, true);

  window.dash_clientside.recycle = Object.assign(window.dash_clientside.recycle || {}, {
    refuse(limit, upload, message) {
      limits.set(upload, [limit, message]);
      return window.dash_clientside.no_update;
    },
  });
})();
