/* Tabs by keyboard: Dash's are plain boxes. Tab reaches them, arrows go along, Enter or space opens. */
(() => {
  const tabs = () => [...document.querySelectorAll(".tab")];

  const describe = () => {
    for (const tab of tabs()) {
      const selected = String(tab.classList.contains("tab--selected"));
      if (tab.getAttribute("aria-selected") === selected) continue;
      tab.setAttribute("role", "tab");
      tab.setAttribute("aria-selected", selected);
      tab.parentElement.setAttribute("role", "tablist");
      tab.tabIndex = 0;
    }
  };
  new MutationObserver(describe).observe(document.documentElement, {
    childList: true, subtree: true, attributes: true, attributeFilter: ["class"],
  });

  document.addEventListener("keydown", (event) => {
    const all = tabs(), at = all.indexOf(event.target), step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (at < 0) return;
    if (event.key === "Enter" || event.key === " ") event.target.click();
    else if (step) all[(at + step + all.length) % all.length].focus();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }, true);
})();
