/* Other times for the timeline in use: the fields of the panel, or a profile or job, go to the server, and the lanes that come
   back take the place of those shown, in the same view. Answers that a later question has overtaken are dropped. */
(function (recycle) {
  "use strict";
  let question = 0;

  const digest = (address) => address.replace(/^.*\/|\.bin$/g, "");

  /* What the server answers of some lanes: {address, headline, table} or {problem}; null where a later question overtook it. */
  async function ask(view, address, wanted) {
    const asked = ++question;
    const answer = await fetch(`retime/${digest(address)}.bin`, {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(wanted),
    });
    if (!answer.ok) return { problem: "These lanes are no longer kept. Load the page again." };
    const buffer = await answer.arrayBuffer(), told = new DataView(buffer).getUint32(0, true);
    const found = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, told)));
    if (asked !== question) return null;
    if (found.problem) return found;
    const table = await recycle.table(found.address, () => buffer.slice(4 + told));
    return asked === question && view.root.isConnected ? { ...found, table } : null;
  }

  function draw(view, found) {
    view.replace(found.table, found.address);
    recycle.dock.headline(found.address, found.headline);
  }

  /* Lanes of `view` in other times, field -> text; resolves when they are about to be drawn, to what is wrong or "". */
  recycle.retime = async function (view, values) {
    const { dataset } = view.root, original = dataset.original || dataset.address, found = await ask(view, original, values);
    if (!found || found.problem) return found?.problem || "";
    dataset.original = original;
    view.times = found.address === original ? null : values;
    draw(view, found);
    return "";
  };

  /* The same in the times of a file. From then on fields change these, until "As given". */
  async function retimeBy(view, file) {
    const { dataset } = view.root, given = dataset.given || dataset.original || dataset.address;
    const found = await ask(view, given, { file: [file.name, await file.text()] });
    if (!found || found.problem) return found?.problem || "";
    Object.assign(dataset, { given, original: found.address });
    view.times = null;
    draw(view, found);
    return `Times of ${file.name}, which a link does not hold.`;
  }

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

  function takeFile(form, file) {
    const view = recycle.inUse(), message = form.querySelector(".retime-message"), most = Number(form.querySelector("[data-retime-file]").dataset.retimeFile);
    if (!view || !file) return;
    if (file.size > most / 2) { message.textContent = `${file.name} is too large for the page (at most ${most / 2 ** 21} MB): use recycle view --profile.`; return; }
    const tell = (text) => { form.isConnected ? (message.textContent = text) : view.announce(text); };
    retimeBy(view, file).then(tell, (error) => tell(error.message));
  }

  function choose(form) {
    const input = recycle.element("input", { type: "file", accept: ".json,.toml" });
    input.addEventListener("change", () => takeFile(form, input.files[0]));
    input.click();
  }

  const formOf = (event) => event.target.closest && event.target.closest(".retime");
  document.addEventListener("dragover", (event) => { if (formOf(event)) event.preventDefault(); });
  document.addEventListener("drop", (event) => {
    const form = formOf(event);
    if (!form) return;
    event.preventDefault();
    takeFile(form, event.dataTransfer.files[0]);
  });

  async function asGiven(form) {
    const view = recycle.inUse();
    for (const label of labels(form)) {
      window.dash_clientside.set_props({ type: "retime", field: label.dataset.field }, { value: label.dataset.given });
    }
    if (!view) return;
    const { dataset } = view.root;
    if (dataset.given) dataset.original = dataset.given;
    delete dataset.given;
    form.querySelector(".retime-message").textContent = await recycle.retime(view, {});
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest && event.target.closest("[data-retime-reset], [data-retime-file]");
    if (!button) return;
    if (button.dataset.retimeFile) choose(formOf(event)); else asGiven(formOf(event));
  });
})(window.recycle = window.recycle || {});
