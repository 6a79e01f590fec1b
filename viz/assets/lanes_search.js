/* `kind:W mb:1.3 stage:2 dur>1.2`: words that an operation must all meet. Other words: worker:, pipeline:, start<, end>,
   rerouted, critical, violation, or a piece of the instruction's text (2F1.5). */
(function (recycle) {
  "use strict";
  const MARKS = { rerouted: "REROUTED", critical: "CRITICAL", violation: "VIOLATION" };
  const NUMBERS = { dur: (t, i) => t.end[i] - t.start[i], start: (t, i) => t.start[i], end: (t, i) => t.end[i] };
  const COMPARE = { "<": (a, b) => a < b, ">": (a, b) => a > b, "<=": (a, b) => a <= b, ">=": (a, b) => a >= b, "=": (a, b) => a === b };

  const FIELDS = {
    kind: (table, text) => {
      const kinds = table.kinds.map((kind) => kind.token.toLowerCase() === text || (text.length > 2 && kind.name.includes(text)));
      return (i) => kinds[table.kind[i]];
    },
    mb: (table, text) => {
      const [pipeline, index] = text.includes(".") ? text.split(".").map(Number) : [null, Number(text)];
      return (i) => table.kinds[table.kind[i]].homed && table.micro_batch[i] === index && (pipeline === null || table.pipeline[i] === pipeline);
    },
    stage: (table, text) => (i) => table.stage[i] === Number(text),
    pipeline: (table, text) => (i) => table.kinds[table.kind[i]].homed && table.pipeline[i] === Number(text),
    worker: (table, text) => {
      const lanes = table.labels.map((label) => label.split(" ")[0] === text);
      return (i, lane) => lanes[lane];
    },
  };

  function condition(table, word) {
    const number = /^(dur|start|end)(<=|>=|<|>|=)([\d.eE+-]+)$/.exec(word);
    if (number) {
      const [, name, sign, bound] = number, factor = table.unit === "s" && table.span < 2 ? 1e-3 : 1;
      return (i) => COMPARE[sign](NUMBERS[name](table, i), Number(bound) * factor);
    }
    const [field, text] = word.split(/:(.*)/s);
    if (text !== undefined && FIELDS[field]) return FIELDS[field](table, text);
    if (MARKS[word]) return (i) => table.has(i, MARKS[word]);
    if (/[:<>=]/.test(word)) throw new Error(`${word}: not one of kind: mb: stage: pipeline: worker: dur> start< end>`);
    return (i) => table.instruction(i).toLowerCase().startsWith(word);
  }

  /* Operations that meet all words, by lane and start. Throws an Error that says which word is not understood. */
  recycle.search = function (table, query) {
    const words = query.trim().toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return null;
    const conditions = words.map((word) => condition(table, word)), found = [];
    for (let lane = 0; lane < table.lanes; lane++) {
      for (let i = table.offsets[lane]; i < table.offsets[lane + 1]; i++) {
        if (conditions.every((holds) => holds(i, lane))) found.push(i);
      }
    }
    return found;
  };
})(window.recycle = window.recycle || {});
