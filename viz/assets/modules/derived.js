/* Tables made of tables: with work in the colour of how much later it starts than in another timeline, and several with
   lane under lane. What draws, searches and tells takes them like any other. An operation of an interleaved table is
   known to the server by the table that it came from: `toServer` and `fromServer` translate. Never colour alone: in a shaded
   table what starts later is `F3›` or `F3»`, what starts earlier `‹F3` or `«F3`, and `F3*` is not in the other one. */
import { fetchBytes, fetchTable } from "viz/table.js";
const NO_PARTNER = 5;

/* 0 and 1: much earlier, earlier; 2: the same; 3 and 4: later, much later; 5: the other one has no such instruction. */
function shade(delta, [some, much]) {
  if (Number.isNaN(delta)) return NO_PARTNER;
  return delta > much ? 4 : delta > some ? 3 : delta < -much ? 0 : delta < -some ? 1 : 2;
}

/* The table with what its starts are compared with (viz/pages/compared.py), for a strip below the lanes. */
function compared(table, deltas, how) {
  const known = deltas.filter((delta) => !Number.isNaN(delta)), extreme = (most) => known.reduce((found, delta) => most(found, delta), 0);
  const made = how.is_shaded ? shaded(table, deltas, how) : Object.create(table);
  made.compared = [{ table: made, deltas, title: how.title, name: how.name, low: extreme(Math.min), high: extreme(Math.max) }];
  return made;
}

/* The table with each kind once per shade, so that shares of time in bands are those of the shades. */
function shaded(table, deltas, { edges, paints, title }) {
  const shades = paints.length, kind = new Uint8Array(table.length), kept = table.paints.length;
  for (let i = 0; i < kind.length; i++) kind[i] = table.kind[i] * shades + shade(deltas[i], edges);
  const kinds = table.kinds.flatMap((one) => paints.map((_, place) => ({
    ...one, parts: one.parts.map(([paint, ...rest]) => [one.transfer ? paint : kept + place, ...rest]),
  })));
  const made = Object.assign(Object.create(table), {
    kind, kinds, chunk_paints: null, paints: [...table.paints, ...paints], busy: paints.map((_, place) => kept + place),
    isWork: kinds.map((_, place) => table.isWork[Math.floor(place / shades)]),
  });
  const before = ["«", "‹", "", "", "", ""], after = ["", "", "", "›", "»", "*"];
  made.label = (operation) => {
    const text = table.label(operation), how = kind[operation] % shades;
    return text && before[how] + text + after[how];
  };
  made.describe = (operation, lane) => {
    const lines = table.describe(operation, lane), delta = deltas[operation];
    const near = Math.abs(delta) <= edges[0], than = `than in ${title}`;
    if (!table.isWork[table.kind[operation]]) return lines;
    if (Number.isNaN(delta)) lines.push(`not in ${title}`);
    else lines.push(near ? `starts as in ${title}` : `starts ${table.time(Math.abs(delta))} ${delta > 0 ? "later" : "earlier"} ${than}`);
    return lines;
  };
  return made;
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
  /* A column of each of the tables as one of this. */
  const gather = (parts, made = new (wide(parts))(offsets[lanes])) => {
    for (let lane = 0; lane < lanes; lane++) {
      const { offsets: own } = tables[lane % each], row = Math.floor(lane / each);
      made.set(parts[lane % each].subarray(own[row], own[row + 1]), offsets[lane]);
    }
    return made;
  };
  const columns = {};
  for (const column of ["start", "end", "reach", "micro_batch", "stage", "pipeline", "flags"]) columns[column] = gather(tables.map((table) => table[column]));
  columns.kind = gather(tables.map((table) => table.kind), new Uint16Array(offsets[lanes]));
  for (let lane = 0; lane < lanes; lane++) {
    const before = tables.slice(0, lane % each).reduce((sum, other) => sum + other.kinds.length, 0);
    if (before) for (let i = offsets[lane]; i < offsets[lane + 1]; i++) columns.kind[i] += before;
  }
  for (let i = 0; i < columns.flags.length; i++) columns.flags[i] &= ~first.bits.CRITICAL; // two paths are not one
  const shift = (place) => tables.slice(0, place).reduce((sum, table) => sum + table.paints.length, 0);
  const per = (values) => Array.from({ length: lanes }, (_, lane) => values(tables[lane % each], Math.floor(lane / each), lane % each));
  const longest = tables.reduce((most, table) => (table.span > most.span ? table : most));
  const made = Object.assign(Object.create(first), columns, {
    lanes, offsets, each, gather, sources: tables, length: offsets[lanes], compared: tables.flatMap((table) => table.compared || []), chunk_paints: null, paints, span: longest.span, unit: longest.unit,
    labels: per((table, own, place) => `${table.labels[own]} ${name(place)}`),
    pipelines: per((table, own) => table.pipelines[own]), ranks: per((table, own) => table.ranks[own]),
    isFailed: Uint8Array.from(per((table, own) => table.isFailed[own])),
    kinds: tables.flatMap((table, place) => table.kinds.map((kind) => ({
      ...kind, parts: kind.parts.map(([paint, ...rest]) => [paint + shift(place), ...rest]),
    }))),
    isWork: tables.flatMap((table) => table.isWork),
    busy: tables.flatMap((table, place) => table.busy.map((paint) => paint + shift(place))),
  });
  made.failed = per((table, own, place) => own * each + place).filter((lane) => made.isFailed[lane]);
  made.label = (operation) => {
    const lane = made.laneOf(operation), table = tables[lane % each];
    return table.label(operation - offsets[lane] + table.offsets[Math.floor(lane / each)]);
  };
  made.describe = (operation, lane) => {
    const place = lane % each, own = Math.floor(lane / each);
    return tables[place].describe(operation - offsets[lane] + tables[place].offsets[own], own);
  };
  made.toServer = (choice) => {
    const lane = choice.lane === undefined ? made.laneOf(choice.operation) : choice.lane, place = lane % each, own = Math.floor(lane / each);
    const operation = choice.operation === undefined ? {} : { operation: choice.operation - offsets[lane] + tables[place].offsets[own] };
    return { ...choice, ...(choice.lane === undefined ? {} : { lane: own }), ...operation, address: addresses[place] };
  };
  made.fromServer = (links) => {
    const place = addresses.indexOf(links.address), table = tables[place];
    if (place < 0) return null;
    const here = (operation) => {
      if (!(operation >= 0)) return operation;
      const own = table.laneOf(operation);
      return operation - table.offsets[own] + offsets[own * each + place];
    };
    return { ...links, operation: here(links.operation), inputs: links.inputs.map(here), outputs: links.outputs.map(here), waited: here(links.waited) };
  };
  return made;
}

/* The table that a place on the page asks for: `data-with` names more tables to interleave, `data-shades` how each is shaded. */
export function tableOf(root) {
  const { address, with: others, shades } = root.dataset;
  if (!others && !shades) return fetchTable(address);
  const addresses = [address, ...JSON.parse(others || "[]")], how = JSON.parse(shades || "[]");
  const made = addresses.map((one, place) => (how[place]
    ? Promise.all([fetchTable(one), fetchBytes(how[place].address)])
      .then(([table, deltas]) => compared(table, new Float32Array(deltas), how[place]))
    : fetchTable(one)));
  return Promise.all(made).then((tables) => (tables.length > 1 ? interleaved(tables, addresses) : tables[0]));
}
