/* Derived tables: shaded by the difference of starts to another timeline, or several tables interleaved lane by lane. They
   have the interface of a table. `toServer` and `fromServer` convert operations of an interleaved table to those of its
   sources. Shades are also marked in labels: later `F3›` or `F3»`, earlier `‹F3` or `«F3`, only here `F3*`. */
import { fetchBytes, fetchTable } from "viz/table.js";
/* 0: much earlier, 1: earlier, 2: the same, 3: later, 4: much later, 5: not in the other timeline. */
const shade = (delta, [some, much]) => (Number.isNaN(delta) ? 5 : delta > much ? 4 : delta > some ? 3 : delta < -much ? 0 : delta < -some ? 1 : 2);

/* The table with the differences of its starts (viz/pages/comparison.py), for a strip below the lanes. */
function withDeltas(table, deltas, options) {
  const matched = deltas.filter((delta) => !Number.isNaN(delta)), extreme = (choose) => matched.reduce((result, delta) => choose(result, delta), 0);
  const derived = options.is_shaded ? shaded(table, deltas, options) : Object.create(table);
  derived.compared = [{ table: derived, deltas, name: options.name, low: extreme(Math.min), high: extreme(Math.max) }];
  return derived;
}

/* The table with each kind once per shade, so that bands show shares of shades. */
function shaded(table, deltas, { edges, paints, title }) {
  const shades = paints.length, kind = new Uint8Array(table.length), offset = table.paints.length;
  for (let i = 0; i < kind.length; i++) kind[i] = table.kind[i] * shades + shade(deltas[i], edges);
  const kinds = table.kinds.flatMap((entry) => paints.map((_, place) => ({
    ...entry, parts: entry.parts.map(([paint, ...rest]) => [entry.transfer ? paint : offset + place, ...rest]),
  })));
  const derived = Object.assign(Object.create(table), {
    kind, kinds, chunk_paints: null, paints: [...table.paints, ...paints], busy: paints.map((_, place) => offset + place),
    isWork: kinds.map((_, place) => table.isWork[Math.floor(place / shades)]),
  });
  const before = ["«", "‹", "", "", "", ""], after = ["", "", "", "›", "»", "*"];
  derived.label = (operation) => {
    const text = table.label(operation), shadeOf = kind[operation] % shades;
    return text && before[shadeOf] + text + after[shadeOf];
  };
  derived.describe = (operation, lane) => {
    const lines = table.describe(operation, lane), delta = deltas[operation];
    if (!table.isWork[table.kind[operation]]) return lines;
    if (Number.isNaN(delta)) return [...lines, `not in ${title}`];
    if (Math.abs(delta) <= edges[0]) return [...lines, `starts as in ${title}`];
    return [...lines, `starts ${table.time(Math.abs(delta))} ${delta > 0 ? "later" : "earlier"} than in ${title}`];
  };
  return derived;
}

const wide = (columns) => columns.reduce((most, column) => (column.BYTES_PER_ELEMENT > most.BYTES_PER_ELEMENT ? column : most)).constructor;

/* Lane 0 of each table, then lane 1 of each, and so on. */
function interleaved(tables, addresses) {
  const [first] = tables, each = tables.length, lanes = first.lanes * each, offsets = new Uint32Array(lanes + 1);
  const name = (place) => String.fromCharCode(65 + place);
  const paints = tables.flatMap((table, place) => table.paints.map((paint) => ({ ...paint, name: `${paint.name} (${name(place)})` })));
  for (let lane = 0; lane < lanes; lane++) {
    const table = tables[lane % each], own = Math.floor(lane / each);
    offsets[lane + 1] = offsets[lane] + table.offsets[own + 1] - table.offsets[own];
  }
  /* Interleave a column of each table. */
  const gather = (parts, column = new (wide(parts))(offsets[lanes])) => {
    for (let lane = 0; lane < lanes; lane++) {
      const { offsets: own } = tables[lane % each], row = Math.floor(lane / each);
      column.set(parts[lane % each].subarray(own[row], own[row + 1]), offsets[lane]);
    }
    return column;
  };
  const before = (list, place) => tables.slice(0, place).reduce((sum, table) => sum + table[list].length, 0), columns = {};
  for (const column of ["start", "end", "reach", "micro_batch", "stage", "pipeline", "flags"]) columns[column] = gather(tables.map((table) => table[column]));
  columns.kind = gather(tables.map((table, place) => { const first = before("kinds", place); return Uint16Array.from(table.kind, (kind) => kind + first); }));
  for (let i = 0; i < columns.flags.length; i++) columns.flags[i] &= ~first.bits.CRITICAL; // the critical path of one table is none of both
  const per = (values) => Array.from({ length: lanes }, (_, lane) => values(tables[lane % each], Math.floor(lane / each), lane % each));
  const longest = tables.reduce((most, table) => (table.span > most.span ? table : most));
  const derived = Object.assign(Object.create(first), columns, {
    lanes, offsets, each, gather, sources: tables, length: offsets[lanes], chunk_paints: null, paints, span: longest.span, unit: longest.unit,
    shares: Float32Array.from(per((table, own) => table.busyShare[own])), compared: tables.flatMap((table) => table.compared || []),
    labels: per((table, own, place) => `${table.labels[own]} ${name(place)}`),
    pipelines: per((table, own) => table.pipelines[own]), ranks: per((table, own) => table.ranks[own]),
    isFailed: Uint8Array.from(per((table, own) => table.isFailed[own])),
    kinds: tables.flatMap((table, place) => table.kinds.map((kind) => ({
      ...kind, parts: kind.parts.map(([paint, ...rest]) => [paint + before("paints", place), ...rest]),
    }))),
    isWork: tables.flatMap((table) => table.isWork),
    busy: tables.flatMap((table, place) => table.busy.map((paint) => paint + before("paints", place))),
  });
  derived.failed = per((table, own, place) => own * each + place).filter((lane) => derived.isFailed[lane]);
  /* The table of a lane, with the operation and the lane there. */
  const source = (lane, operation) => {
    const table = tables[lane % each], row = Math.floor(lane / each);
    return [table, operation - offsets[lane] + table.offsets[row], row];
  };
  derived.label = (operation) => { const [table, own] = source(derived.laneOf(operation), operation); return table.label(own); };
  derived.describe = (operation, lane) => { const [table, own, row] = source(lane, operation); return table.describe(own, row); };
  derived.toServer = (choice) => {
    const lane = choice.lane ?? derived.laneOf(choice.operation), [, operation, row] = source(lane, choice.operation);
    return { ...choice, ...(choice.lane === undefined ? { operation } : { lane: row }), address: addresses[lane % each] };
  };
  derived.fromServer = (links) => {
    const place = addresses.indexOf(links.address), table = tables[place];
    if (place < 0) return null;
    const ownIndex = (operation) => {
      if (!(operation >= 0)) return operation;
      const own = table.laneOf(operation);
      return operation - table.offsets[own] + offsets[own * each + place];
    };
    return { ...links, operation: ownIndex(links.operation), inputs: links.inputs.map(ownIndex), outputs: links.outputs.map(ownIndex), waited: ownIndex(links.waited) };
  };
  return derived;
}

/* The table of a view: `data-with` names tables to interleave, `data-shades` their shading. */
export function tableOf(root) {
  const { address, with: others, shades } = root.dataset;
  if (!others && !shades) return fetchTable(address);
  const addresses = [address, ...JSON.parse(others || "[]")], options = JSON.parse(shades || "[]");
  const loading = addresses.map((source, place) => (options[place]
    ? Promise.all([fetchTable(source), fetchBytes(options[place].address)])
      .then(([table, deltas]) => withDeltas(table, new Float32Array(deltas), options[place]))
    : fetchTable(source)));
  return Promise.all(loading).then((tables) => (tables.length > 1 ? interleaved(tables, addresses) : tables[0]));
}
