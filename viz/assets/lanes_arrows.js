/* The server's answer to a selection: which operations its arrows go to, and the memory of its worker. */
window.dash_clientside = window.dash_clientside || {};
window.dash_clientside.recycle = {
  arrows(links) {
    if (!links) return null;
    for (const view of window.recycle.views.values()) {
      if (view.root.dataset.address !== links.address) continue;
      if (links.memory) view.memory = links.memory;
      if (view.selected >= 0 && view.selected === links.operation) view.links = links;
      view.redraw();
    }
    return links.operation === undefined ? null : links.operation;
  },
};
