/* Rules of accessibility that a page keeps, and which it breaks: those that axe-core counts as serious or critical and that
   this viewer can break, written from WCAG 2.1 (axe-core itself is no Python package). */
() => {
  const faults = [], said = (rule, node, text) => faults.push(`${rule}: ${node.outerHTML.slice(0, 110)} ${text || ""}`);
  const seen = (node) => node.getClientRects().length > 0 && getComputedStyle(node).visibility !== "hidden";
  const shown = (query) => [...document.querySelectorAll(query)].filter(seen);
  const hidden = (node) => node.closest('[aria-hidden="true"], [inert]') !== null;
  const byId = (ids) => (ids || "").split(/\s+/).filter(Boolean).map((id) => document.getElementById(id));
  const name = (node) => [
    byId(node.getAttribute("aria-labelledby")).map((one) => one?.textContent).join(" "), node.getAttribute("aria-label"),
    node.labels && [...node.labels].map((label) => label.textContent).join(" "), node.textContent, node.title, node.alt, node.placeholder,
  ].find((text) => text && text.trim());

  // document-title, html-has-lang, landmark-one-main, page-has-heading-one
  if (!document.title.trim()) faults.push("document-title");
  if (!document.documentElement.lang) faults.push("html-has-lang");
  if (document.querySelectorAll("main").length !== 1) faults.push("landmark-one-main");
  if (shown("h1").length !== 1) faults.push(`page-has-heading-one: ${shown("h1").length}`);

  // button-name, link-name, label, image-alt, role-img-alt, aria-input-field-name
  const controls = 'button, a[href], input:not([type=hidden]), select, textarea, [role=button], [role=tab], [role=slider], [role=separator][tabindex], [role=combobox], [role=checkbox], [role=radio], summary';
  for (const node of shown(controls)) if (!hidden(node) && !name(node)) said("control-name", node);
  for (const node of shown('[role=img], [role=tabpanel], [role=tablist], [role=dialog], dialog[open]')) {
    if (!hidden(node) && node.getAttribute("role") !== "tablist" && !name(node)) said("role-name", node);
  }
  for (const node of shown("img")) if (node.getAttribute("alt") === null) said("image-alt", node);

  // aria-valid-attr-value, aria-allowed-role, duplicate-id-aria
  for (const node of document.querySelectorAll("[aria-labelledby], [aria-controls], [aria-describedby]")) {
    for (const attribute of ["aria-labelledby", "aria-describedby"]) {
      if (byId(node.getAttribute(attribute)).includes(null)) said("aria-valid-attr-value", node, attribute);
    }
  }
  for (const node of document.querySelectorAll("[role=tab]")) {
    if (!node.closest("[role=tablist]")) said("aria-required-parent", node);
    if (!["true", "false"].includes(node.getAttribute("aria-selected"))) said("aria-required-attr", node, "aria-selected");
  }
  for (const node of shown("[role=slider], [role=separator][tabindex]")) {
    if (!/^-?[\d.]+$/.test(node.getAttribute("aria-valuenow") || "")) said("aria-required-attr", node, "aria-valuenow");
  }
  const ids = [...document.querySelectorAll("[id]")].map((node) => node.id);
  for (const id of new Set(ids.filter((one, place) => ids.indexOf(one) !== place))) faults.push(`duplicate-id: ${id}`);

  // keyboard: what a pointer presses takes the focus, nothing comes before its place in the document, nothing hidden takes it
  for (const node of shown('button, a[href], [role=tab], [role=button], summary')) {
    const inTabs = node.closest("[role=tablist]"); // arrows lead along them
    if (node.tabIndex < 0 && !inTabs && !node.disabled) said("keyboard", node);
  }
  for (const node of document.querySelectorAll("[tabindex]")) if (node.tabIndex > 0) said("tabindex", node);
  for (const node of shown('[aria-hidden="true"] :is(button, a[href], input, [tabindex="0"])')) said("aria-hidden-focus", node);
  const scrolls = (node) => /auto|scroll/.test(getComputedStyle(node).overflowY) && node.scrollHeight > node.clientHeight + 2;
  for (const node of shown("body *")) {
    if (scrolls(node) && node.tabIndex < 0 && !node.querySelector('button, a[href], input, [tabindex="0"]') && !node.closest('[tabindex="0"]')) said("scrollable-region-focusable", node);
  }

  // color-contrast of texts, by what is drawn behind them; of colours over pictures nothing can be said
  const rgba = (text) => { const found = text.match(/[\d.]+/g).map(Number); return [...found.slice(0, 3), found[3] ?? 1]; };
  const over = ([r, g, b, a], [x, y, z]) => [r * a + x * (1 - a), g * a + y * (1 - a), b * a + z * (1 - a), 1];
  const ground = (node) => {
    const layers = [];
    for (let one = node; one; one = one.parentElement) {
      const style = getComputedStyle(one);
      if (style.backgroundImage !== "none") return null;
      if (style.backgroundColor.startsWith("rgb")) layers.push(rgba(style.backgroundColor));
      if (layers.length && layers[layers.length - 1][3] === 1) break;
    }
    const dark = matchMedia("(prefers-color-scheme: dark)").matches && getComputedStyle(document.documentElement).colorScheme.includes("dark");
    return layers.reverse().reduce((below, layer) => over(layer, below), dark ? [18, 18, 18, 1] : [255, 255, 255, 1]);
  };
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, place) => sum + c * [0.2126, 0.7152, 0.0722][place], 0);
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), reported = new Set();
  for (let text = texts.nextNode(); text; text = texts.nextNode()) {
    const node = text.parentElement;
    if (!text.data.trim() || !seen(node) || hidden(node) || node.closest("svg, script, style, [disabled]")) continue;
    const style = getComputedStyle(node), behind = ground(node);
    if (!behind || !style.color.startsWith("rgb")) continue;
    const [a, b] = [light(over(rgba(style.color), behind)), light(behind)].sort((x, y) => y - x), ratio = (a + 0.05) / (b + 0.05);
    const size = parseFloat(style.fontSize), isLarge = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    const key = `${node.tagName}.${node.className} ${style.color} ${behind}`;
    if (ratio < (isLarge ? 3 : 4.5) && !reported.has(key)) { reported.add(key); said("color-contrast", node, ratio.toFixed(2)); }
  }
  return faults;
}
