/* Timelines come and go with the pages that Dash builds: each is attached when it appears and forgotten when it is gone. */
(function (recycle) {
  "use strict";
  function attach(root) {
    root.dataset.attached = "yes";
    if (!root.querySelector(".lanes-stage > canvas").getContext("2d", { willReadFrequently: true })) {
      root.querySelector(".lanes-status").textContent = "This browser has no canvas: the timeline is shown whole, without zoom.";
      return;
    }
    const failed = (error) => {
      root.dataset.failed = "yes";
      root.querySelector(".lanes-status").textContent = `The timeline could not be loaded (${error.message}). Load the page again.`;
    };
    const overlay = root.querySelector(".lanes-axes");
    const inSight = new Promise((done) => {
      const look = () => {
        if (overlay.getBoundingClientRect().width > 0) done();
        else if (root.isConnected) requestAnimationFrame(look);
      };
      look();
    });
    Promise.all([recycle.tableOf(root), inSight]).then(([table]) => {
      const view = new recycle.View(root, table);
      if (root.dataset.ghost) recycle.table(root.dataset.ghost).then((old) => { view.ghost = old; view.redraw(); }, () => {});
    }).catch(failed);
  }

  /* Dash puts timelines on the page at any time, and takes them away again. */
  let looking = false;
  new MutationObserver(() => {
    if (looking) return;
    looking = true;
    requestAnimationFrame(() => {
      looking = false;
      document.querySelectorAll(".lanes-view:not([data-attached])").forEach(attach);
      for (const [name, view] of recycle.views) {
        if (view.root.isConnected) continue;
        view.ended.abort();
        recycle.views.delete(name);
      }
      if (recycle.active && !recycle.active.root.isConnected) {
        recycle.left = recycle.active.used ? recycle.active.name : null;
        recycle.active = recycle.views.values().next().value;
      }
    });
  }).observe(document.documentElement, { childList: true, subtree: true });

})(window.recycle = window.recycle || {});
