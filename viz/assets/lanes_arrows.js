/* The server's answer to a selection: which operations its arrows go to. */
window.dash_clientside = window.dash_clientside || {};
window.dash_clientside.recycle = {
  arrows(links) {
    if (!links || !Number.isInteger(links.operation)) return null;
    for (const view of window.recycle.views.values()) {
      if (view.selected !== links.operation || view.root.dataset.address !== links.address) continue;
      view.links = links;
      view.redraw();
    }
    return links.operation;
  },
};
