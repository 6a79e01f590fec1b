/* The server's answer to a selection: which operations its arrows go to, and the memory of its worker. */
window.dash_clientside = window.dash_clientside || {};
window.dash_clientside.recycle = Object.assign(window.dash_clientside.recycle || {}, {
  arrows(links) {
    if (!links) return null;
    for (const view of window.recycle.views.values()) {
      const found = view.table.fromServer ? view.table.fromServer(links) : view.root.dataset.address === links.address && links;
      if (!found) continue;
      if (found.memory) view.memory = found.memory;
      if (view.selected >= 0 && view.selected === found.operation) view.links = found;
      view.redraw();
    }
    return links.operation === undefined ? null : links.operation;
  },
});
