/* Reports when the server does not respond. Panels that have no answer are asked for with the next change of the lanes. */
import { dock } from "viz/dock.js";
import { element } from "viz/page.js";
const ask = window.fetch.bind(window);
const notice = element("p", { className: "lost", hidden: true, role: "alert" });

function notify(isLost) {
  if (notice.hidden !== isLost) return;
  document.body.append(notice);
  notice.textContent = isLost ? "The viewer's server does not respond. The drawn lanes stay usable; start recycle view again for the rest." : "";
  notice.hidden = !isLost;
}

window.fetch = (...request) => ask(...request).then(
  (answer) => { notify(false); if (!answer.ok) dock.forget(); return answer; },
  (error) => { if (error.name !== "AbortError") { notify(true); dock.forget(); } throw error; },
);
