/* Reports when the server does not respond. */
const ask = window.fetch.bind(window);
const notice = Object.assign(document.createElement("p"), { className: "lost", hidden: true });
notice.setAttribute("role", "alert");

function notify(isLost) {
  if (notice.hidden !== isLost) return;
  if (!notice.isConnected) document.body.append(notice);
  notice.textContent = isLost ? "The viewer's server does not respond. The drawn lanes stay usable; start recycle view again for the rest." : "";
  notice.hidden = !isLost;
}

window.fetch = (...request) => ask(...request).then(
  (answer) => { notify(false); return answer; },
  (error) => { if (error.name !== "AbortError") notify(true); throw error; },
);
