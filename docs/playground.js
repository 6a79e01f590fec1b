/* The playground: a file that somebody drops is drawn in the browser alone. It takes timelines, which hold their times: Chrome
   traces as `recycle convert` and `recycle train` write them, and pages that `recycle view --export` wrote. Kinds, colours and
   texts are those of the example that the page was made with. */
(function (recycle) {
  "use strict";
  const NONE = 0xffffffff, MOST_BYTES = 2 ** 29, MOST_LANES = 2 ** 16, GUTTER = 20, CHARACTER = 6.8, GROUPS = 19, BUSY = 6;
  const PAIR = /^\((\d+)F(\d+)\.(\d+);(\d+)B(\d+)\.(\d+)\)$/, SINGLE = /^(\d+)([A-Z_]+)(?:(\d+)\.(\d+))?(?:[@/].*)?$/;
  const { element } = recycle;
  let dropped = 0;

  /* {token, stage, pipeline, micro_batch, …} of an instruction's text, null where it is none. */
  function parsed(text) {
    const pair = PAIR.exec(text), single = pair ? null : SINGLE.exec(text);
    if (pair) {
      const [stage, pipeline, micro_batch, , pipeline2, micro_batch2] = pair.slice(1).map(Number);
      return { token: ";", stage, pipeline, micro_batch, pipeline2, micro_batch2 };
    }
    if (!single) return null;
    const isHomed = single[3] !== undefined;
    return { token: single[2], stage: Number(single[1]), pipeline: isHomed ? Number(single[3]) : NONE, micro_batch: isHomed ? Number(single[4]) : NONE };
  }

  /* Operations of the slices of a trace, by lane and start. */
  function operations(trace, known, { pipelines, ranks }) {
    const found = [];
    for (const event of trace.traceEvents) {
      const { ph, args, ts, dur } = event;
      if (ph !== "X" || !args || typeof args.worker !== "string") continue;
      const what = parsed(args.instruction || event.name), kind = what ? known.kinds.findIndex((one) => one.token === what.token) : -1;
      const [k, r] = args.worker.split(".").map(Number);
      if (kind < 0 || !(k < pipelines && r < ranks) || !Number.isFinite(ts) || !Number.isFinite(dur)) continue;
      if (known.kinds[kind].transfer && dur <= 0) continue;
      const at = args.role ? Number(args.role.split(".")[0]) : k, isAway = args.rerouted ?? (what.pipeline !== NONE && what.pipeline !== at);
      found.push({ ...what, kind, lane: k * ranks + r, ts, end: ts + dur, isAway });
    }
    return found.sort((a, b) => a.lane - b.lane || a.ts - b.ts || a.end - b.end);
  }

  /* A table as of lanes.bin, with what `known` says of kinds and colours. */
  function tableOf(trace, known) {
    const { shape, microseconds_per_unit: unit, failed: dead } = trace.otherData || {};
    if (!Array.isArray(trace.traceEvents) || !shape) throw new Error("no timeline of recycle: traceEvents and otherData.shape are missing");
    const lanes = shape.pipelines * shape.ranks, seconds = 1e6;
    if (!(lanes <= MOST_LANES)) throw new Error(`a page shows at most ${MOST_LANES} workers`);
    const found = operations(trace, known, shape);
    if (!found.length) throw new Error("it holds no instruction");
    const first = found.reduce((least, one) => Math.min(least, one.ts), Infinity), offsets = new Uint32Array(lanes + 1);
    for (const { lane } of found) offsets[lane + 1]++;
    for (let lane = 0; lane < lanes; lane++) offsets[lane + 1] += offsets[lane];
    const column = (Type, value) => Type.from(found, value), time = (at) => (at - first) / (unit || seconds);
    const workers = Array.from({ length: lanes }, (_, lane) => [Math.floor(lane / shape.ranks), lane % shape.ranks]);
    const labels = workers.map(([k, r]) => `${k}.${r}`), chunks = shape.chunks || 1;
    const failed = labels.map((label, lane) => ((dead || []).includes(label) ? lane : -1)).filter((lane) => lane >= 0);
    const end = column(Float32Array, (one) => time(one.end)), span = end.reduce((most, one) => Math.max(most, one), 0);
    const table = Object.assign(Object.create(known), {
      lanes, length: found.length, origin: first, offsets, end, start: column(Float32Array, (one) => time(one.ts)),
      kind: column(Uint8Array, (one) => one.kind), stage: column(Uint16Array, (one) => one.stage),
      pipeline: column(Uint32Array, (one) => one.pipeline), micro_batch: column(Uint32Array, (one) => one.micro_batch),
      flags: column(Uint8Array, (one) => (one.isAway ? known.bits.REROUTED : 0)),
      pipeline2: column(Uint32Array, (one) => one.pipeline2 || 0), micro_batch2: column(Uint32Array, (one) => one.micro_batch2 || 0),
      labels, pipelines: workers.map(([k]) => k), ranks: workers.map(([, r]) => r), failed, isFailed: Uint8Array.from(labels, (_, lane) => (failed.includes(lane) ? 1 : 0)),
      span, unit: unit ? [1, ""] : span >= 2 ? [1, "s"] : [1000, "ms"], by_rank: chunks === 1 ? "stage" : "rank",
      chunk_paints: known.chunk_paints.slice(0, Math.max(1, chunks)), stages_per_chunk: shape.ranks,
    });
    table.reach = table._reach();
    return table;
  }

  function legendOf(table) {
    const paints = new Set([...new Set(table.kind)].flatMap((kind) => table.kinds[kind].parts.map(([paint]) => paint)));
    return [...paints].map((paint) => {
      const swatch = element("span", { className: "swatch" });
      swatch.style.background = table.paints[paint].fill;
      return element("li", {}, swatch, table.paints[paint].name);
    });
  }

  /* A timeline of a table in place of the one dropped before: a copy of the example's without what it has drawn. */
  function show(example, table, title) {
    document.querySelectorAll(".lanes.dropped").forEach((old) => old.remove());
    const made = example.cloneNode(true), root = made.querySelector(".lanes-view"), address = `dropped:${++dropped}`;
    for (const name of ["attached", "drawn", "level", "failed", "linked"]) delete root.dataset[name];
    const groups = table.pipelines[table.lanes - 1] > 0 && Math.max(...table.ranks) > 0 ? GROUPS : 0;
    const longest = table.labels.reduce((most, label) => Math.max(most, label.length), 0), [, top, right, bottom] = root.dataset.margins.split(" ");
    const left = Math.round(GUTTER + CHARACTER * (longest + BUSY + groups));
    Object.assign(root.dataset, { address, name: address, span: table.span, scale: table.unit[0], word: table.unit[1], margins: [left, top, right, bottom].join(" "), linked: "" });
    made.classList.add("dropped");
    made.style.setProperty("--lanes", table.lanes);
    const heading = root.querySelector("h3") || root.querySelector(".lanes-head").insertAdjacentElement("afterbegin", element("h3"));
    heading.textContent = heading.title = title;
    root.querySelector(".lanes-stage > canvas").setAttribute("aria-label", `${title}: ${table.length} operations on ${table.lanes} workers`);
    root.querySelectorAll(".lanes-axes, .lanes-tools, .lanes-minimap, .lanes-memory, .lanes-status").forEach((place) => place.replaceChildren());
    root.querySelectorAll(".lanes-listing").forEach((listing) => listing.remove());
    root.querySelector(".legend").replaceChildren(...legendOf(table));
    recycle.table(address, () => table);
    document.querySelector(".playground").after(made);
  }

  async function textOf(file) {
    if (file.size > MOST_BYTES) throw new Error(`${Math.ceil(file.size / 2 ** 20)} MB are too large for a page (at most ${MOST_BYTES / 2 ** 20})`);
    return file.name.endsWith(".gz") ? new Response(file.stream().pipeThrough(new DecompressionStream("gzip"))).text() : file.text();
  }

  /* Tables in a dropped file: one of a trace, all of an exported page. */
  async function tablesOf(file, known) {
    const text = await textOf(file), held = [...text.matchAll(/data-address="(data:application\/gzip;base64,[^"]+)"/g)];
    if (held.length) return Promise.all(held.slice(0, 1).map(([, address]) => recycle.table(address)));
    let read;
    try { read = JSON.parse(text); } catch { throw new Error("neither JSON nor a page of recycle view --export"); }
    if (!read.traceEvents && (read.programs || read.shape)) throw new Error("a schedule has no times yet: recycle convert FILE timeline.json --to chrome-trace");
    return [tableOf(read, known)];
  }

  async function take(file) {
    const status = document.querySelector(".playground [role=status]"), example = document.querySelector(".lanes:not(.dropped)");
    status.textContent = `Reading ${file.name} …`;
    try {
      const known = await recycle.table(example.querySelector(".lanes-view").dataset.address), [table] = await tablesOf(file, known);
      show(example, table, file.name);
      status.textContent = `${file.name}: ${table.length.toLocaleString("en")} operations on ${table.lanes} workers. It did not leave this browser.`;
    } catch (error) {
      status.textContent = `${file.name} cannot be drawn: ${error.constructor === Error ? error.message : "it is damaged"}`;
    }
  }

  document.querySelector(".playground input").addEventListener("change", (event) => { if (event.target.files[0]) take(event.target.files[0]); });
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    if (event.dataTransfer.files[0]) take(event.dataTransfer.files[0]);
  });
})(window.recycle);
