/* Says when the server does not answer. What is drawn stays in use; what a press asks for would be missing without a word. */
const ask = window.fetch.bind(window);
const told = Object.assign(document.createElement("p"), { className: "lost", hidden: true });
told.setAttribute("role", "alert");

function tell(isLost) {
  if (told.hidden !== isLost) return;
  if (!told.isConnected) document.body.append(told);
  told.textContent = isLost ? "The viewer's server does not answer. What is drawn can still be looked at; start recycle view again for the rest." : "";
  told.hidden = !isLost;
}

window.fetch = (...request) => ask(...request).then(
  (answer) => { tell(false); return answer; },
  (error) => { if (error.name !== "AbortError") tell(true); throw error; },
);
