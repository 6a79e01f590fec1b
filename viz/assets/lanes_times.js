/* Other times for the timeline in use: the fields of the panel go to the server, and the lanes that come back take the place
   of those shown, in the same view. Answers that a later question has overtaken are dropped. */
(function (recycle) {
  "use strict";
  let question = 0;

  const digest = (address) => address.replace(/^.*\/|\.bin$/g, "");

  /* Lanes of `view` in other times, field -> text; resolves when they are about to be drawn, to what is wrong or "". */
  recycle.retime = async function (view, values) {
    const { dataset } = view.root, original = dataset.original || dataset.address, asked = ++question;
    const answer = await fetch(`retime/${digest(original)}.bin`, {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(values),
    });
    if (!answer.ok) return "These lanes are no longer kept. Load the page again.";
    const buffer = await answer.arrayBuffer(), told = new DataView(buffer).getUint32(0, true);
    const found = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, told)));
    if (asked !== question || found.problem) return found.problem || "";
    const table = await recycle.table(found.address, () => buffer.slice(4 + told));
    if (asked !== question || !view.root.isConnected) return "";
    dataset.original = original;
    view.times = found.address === original ? null : values;
    view.replace(table, found.address);
    recycle.dock.headline(found.address, found.headline);
    return "";
  };

  const labels = (form) => [...form.querySelectorAll("[data-field]")];

  /* One question at a time: what is typed while it is under way is asked when its answer has come. */
  async function send(form) {
    if (form.asks) { form.asksAgain = true; return; }
    const view = recycle.inUse(), message = form.querySelector(".retime-message");
    if (!view || view.table.toServer) return;
    const changed = labels(form).filter((label) => label.querySelector("input").value.trim() !== label.dataset.given);
    const values = Object.fromEntries(changed.map((label) => [label.dataset.field, label.querySelector("input").value]));
    form.asks = true;
    try { message.textContent = await recycle.retime(view, values); } catch (error) { message.textContent = error.message; }
    form.asks = false;
    if (form.asksAgain) { form.asksAgain = false; send(form); }
  }

  document.addEventListener("input", (event) => {
    const form = event.target.closest && event.target.closest(".retime");
    if (form) send(form);
  });

  document.addEventListener("click", (event) => {
    const reset = event.target.closest && event.target.closest("[data-retime-reset]");
    if (!reset) return;
    const form = reset.closest(".retime");
    for (const label of labels(form)) {
      window.dash_clientside.set_props({ type: "retime", field: label.dataset.field }, { value: label.dataset.given });
    }
    const view = recycle.inUse();
    if (view) recycle.retime(view, {}).then((problem) => { form.querySelector(".retime-message").textContent = problem; });
  });
})(window.recycle = window.recycle || {});
