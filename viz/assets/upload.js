/* A file beyond the limit never leaves the browser; Dash drops it without a word, so the word is said here. */
window.dash_clientside = window.dash_clientside || {};
window.dash_clientside.recycle = Object.assign(window.dash_clientside.recycle || {}, {
  refuse(limit, upload, message) {
    const place = document.getElementById(upload);
    const look = (event) => {
      const files = event.type === "drop" ? event.dataTransfer.files : event.target.files, file = files && files[0];
      if (!file || file.size <= limit) return;
      const size = `${(file.size / 2 ** 20).toFixed(0)} MB`, most = `${Math.floor(limit / 2 ** 20)} MB`;
      const children = `${file.name}: ${size} is too large for the page (at most ${most}): use recycle check`;
      window.dash_clientside.set_props(message, { children, className: "status" });
    };
    for (const event of ["drop", "change"]) place.addEventListener(event, look, true);
    return window.dash_clientside.no_update;
  },
});
