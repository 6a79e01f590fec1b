/* Where a browser gives no canvas the server draws the window as a PNG; it comes a moment after the axes moved. */
(function (recycle) {
  "use strict";
  recycle.picture = function (view, plot) {
    clearTimeout(view.pictured);
    view.pictured = setTimeout(() => {
      const { t0, t1, y0, y1 } = view.view, stage = view.canvas.parentElement;
      let image = stage.querySelector("img.lanes-picture");
      if (!image) {
        image = document.createElement("img");
        image.className = "lanes-picture";
        image.alt = view.canvas.getAttribute("aria-label");
        stage.prepend(image);
      }
      const query = new URLSearchParams({
        t0, t1, y0, y1, width: Math.round(plot.width), height: Math.round(plot.height), grouping: view.rows.grouping,
      });
      image.src = `${view.root.dataset.address.replace(/\.bin$/, ".png")}?${query}`;
      Object.assign(image.style, {
        left: `${plot.left}px`, top: `${plot.top}px`, width: `${plot.width}px`, height: `${plot.height}px`,
      });
    }, 120);
  };
})(window.recycle = window.recycle || {});
