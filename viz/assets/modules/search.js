/* Search for operations of a timeline, of any number of them: a query is terms, all of which must hold.

     query = { [ "-" ] term }               "-" negates
     term  = field ":" value { "," value }  any of the values
           | field op number                op is < <= > >= =
           | word                           a part of the instruction's text
     field: kind mb stage worker pipeline is; with numbers: stage pipeline dur start end

   `kind:W mb:1.3 stage:2 dur>1.2`; `mb:3` is micro-batch 3 of any pipeline, `worker:1.*` any rank, `stage:2..5` a range.
   A kind is found by its token and by the search words of its row in the table of kinds. Times are those of the axis. */
const LONGEST = 1000, MAX_TERMS = 40, SHARE = 1e-6;
const TERM = /^(-?)([a-z]+)(:|<=|>=|<|>|=)(\S*)$/, RANGE = /^(\d{1,9})(?:\.\.(\d{1,9}))?$/, PAIR = /^(\d{1,9}|\*)\.(\d{1,9}|\*)$/;
const MARKS = { rerouted: "REROUTED", critical: "CRITICAL", violation: "VIOLATION" };
const COMPARE = {
  "<": (a, b, near) => a < b - near, ">": (a, b, near) => a > b + near, "=": (a, b, near) => Math.abs(a - b) <= near,
  "<=": (a, b, near) => a <= b + near, ">=": (a, b, near) => a >= b - near,
};

const homed = (table, i) => table.kinds[table.kind[i]].homed;
const pipeline = (table, i) => (homed(table, i) ? table.pipeline[i] : -1);
const NUMBERS = {
  stage: (table, i) => table.stage[i], pipeline, dur: (table, i) => table.end[i] - table.start[i],
  start: (table, i) => table.start[i], end: (table, i) => table.end[i],
};
const TIMES = ["dur", "start", "end"];

function range(word, text, example) {
  const match = RANGE.exec(text);
  if (!match) throw new Error(`${word}: ${text} is not a number; write ${example}:2 or ${example}:2..5`);
  const low = Number(match[1]), high = Number(match[2] || match[1]);
  return (value) => value >= low && value <= high;
}

function pair(word, text, what) {
  const match = PAIR.exec(text);
  if (!match) throw new Error(`${word}: ${text} is not a ${what}`);
  return match.slice(1).map((part) => (value) => part === "*" || value === Number(part));
}

const FIELDS = {
  kind: (table, word, text) => {
    const names = table.kinds.map(({ token, words }) => [token.toLowerCase(), ...words]);
    const known = [...new Set([...names.map(([token]) => token).filter((token) => token !== ";"), ...names.flatMap((all) => all.slice(1))])];
    if (!known.includes(text)) throw new Error(`${word}: ${text} is not a kind; known are ${known.join(", ")}`);
    const kinds = names.map((all) => all.includes(text));
    return (i) => kinds[table.kind[i]];
  },
  mb: (table, word, text) => {
    if (RANGE.test(text)) { const has = range(word, text, "mb"); return (i) => homed(table, i) && has(table.micro_batch[i]); }
    const [home, index] = pair(word, text, "micro-batch; write mb:1.3, mb:3, mb:1.* or mb:2..5");
    return (i) => homed(table, i) && home(table.pipeline[i]) && index(table.micro_batch[i]);
  },
  stage: (table, word, text) => { const has = range(word, text, "stage"); return (i) => has(table.stage[i]); },
  worker: (table, word, text) => {
    const [home, rank] = pair(word, text, "worker; write worker:1.2, worker:1.* or worker:*.2");
    const lanes = table.pipelines.map((p, lane) => home(p) && rank(table.ranks[lane]));
    return (i, lane) => lanes[lane];
  },
  pipeline: (table, word, text) => { const has = range(word, text, "pipeline"); return (i) => has(pipeline(table, i)); },
  is: (table, word, text) => {
    if (!MARKS[text]) throw new Error(`${word}: ${text} is not a mark; known are ${Object.keys(MARKS).join(", ")}`);
    return (i) => table.has(i, MARKS[text]);
  },
};
const known = () => [...new Set([...Object.keys(FIELDS), ...Object.keys(NUMBERS)])].join(", ");

function values(table, word, field, text) {
  if (!FIELDS[field]) throw new Error(`${word}: ${NUMBERS[field] ? `${field} is compared as ${field}>1` : `${field} is not a field; known are ${known()}`}`);
  const parts = text.split(",");
  if (!parts.every(Boolean)) throw new Error(`${word}: a value is missing after ${field}:`);
  const any = parts.map((part) => FIELDS[field](table, word, part));
  return (i, lane) => any.some((holds) => holds(i, lane));
}

/* Times are in the unit of the axis, and equal within the browser's rounding. */
function number(table, word, field, sign, text) {
  if (!NUMBERS[field]) throw new Error(`${word}: ${FIELDS[field] ? `${field} takes values as ${field}:…` : `${field} is not a field; known are ${known()}`}`);
  if (!text || Number.isNaN(Number(text))) throw new Error(`${word}: ${text || "nothing"} is not a number`);
  const isTime = TIMES.includes(field), bound = Number(text) / (isTime ? table.unit[0] : 1), near = isTime ? table.span * SHARE : 0;
  return (i) => COMPARE[sign](NUMBERS[field](table, i), bound, near);
}

function term(table, word) {
  const match = TERM.exec(word), not = (holds, negated) => (negated ? (i, lane) => !holds(i, lane) : holds);
  if (match) {
    const [, negation, field, sign, text] = match;
    return not(sign === ":" ? values(table, word, field, text) : number(table, word, field, sign, text), negation);
  }
  if (/[:<>=]/.test(word)) throw new Error(`${word}: write field:value or field>number; fields are ${known()}`);
  const negated = word.startsWith("-") && word.length > 1, part = negated ? word.slice(1) : word;
  return not((i) => table.instruction(i).toLowerCase().includes(part), negated);
}

/* The first `most` of some operations by time. */
export function earliest(table, matches, most) {
  const first = [], isBefore = (a, b) => table.start[a] < table.start[b] || (table.start[a] === table.start[b] && a < b);
  for (const i of matches) {
    if (first.length === most && !isBefore(i, first[most - 1])) continue;
    let place = first.length;
    while (place && isBefore(i, first[place - 1])) place--;
    first.splice(place, 0, i);
    first.length = Math.min(first.length, most);
  }
  return first;
}

/* Operations that match all terms, by lane and start; null without terms. Throws an Error that names a wrong term. */
export function searchTable(table, query) {
  const words = query.trim().toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return null;
  if (query.length > LONGEST || words.length > MAX_TERMS) throw new Error(`at most ${MAX_TERMS} terms and ${LONGEST} characters`);
  const terms = words.map((word) => term(table, word)), matches = [];
  for (let lane = 0; lane < table.lanes; lane++) {
    for (let i = table.offsets[lane]; i < table.offsets[lane + 1]; i++) {
      if (terms.every((holds) => holds(i, lane))) matches.push(i);
    }
  }
  return matches;
}
