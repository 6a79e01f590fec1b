/* A file beyond an upload's limit never leaves the browser. Dash ignores it silently; this writes the reason on the page. */
window.dash_clientside = window.dash_clientside || {};
(() => {
  const limits = new Map(); // identifier of an upload -> [bytes, identifier of the line that says so]

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
