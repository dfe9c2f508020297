// The panel of one cell, and the answer about a stack.

const RESULT = { ok: "right", leak: "leaks", error: "error", unknown: "not run" };
const MARK = { ok: "✓", leak: "✗", error: "!", unknown: "?" };
const list = items => make("ul", {}, ...items.map(item => make("li", {}, ...[item].flat())));
const fold = (summary, ...inner) => make("details", {}, make("summary", {}, summary), ...inner);

// Every version of an architecture that was checked, next to the one that is shown.
function neighbours(name, number) {
  const { pairs } = architectures.get(name);
  const near = step => { for (let at = number + step; at >= 0 && at < pairs.length; at += step) if (pairs[at]) return at; return null; };
  const [older, newer] = [near(-1), near(1)];
  return make("p", { class: "near" },
    older === null ? null : make("a", { href: cellAddress(name, older) }, "‹ " + environments[older].name),
    newer === null ? null : make("a", { href: cellAddress(name, newer) }, environments[newer].name + " ›"));
}

function cellPanel(name, number) {
  const cell = lookUp(name, number), where = environments[number];
  return [
    neighbours(name, number),
    make("p", { class: "verdict " + cell.state }, cell.verdict),
    make("h3", {}, "With fa2patch"), ...withFa2patch(cell),
    make("h3", {}, "Transformers alone"), ...alone(cell),
    make("h3", {}, "On a GPU"), make("p", {}, data.gpu[name] ? data.gpu[name][1] : "Not run yet."),
    make("h3", {}, "How it was checked"), make("p", {}, cell.made + " " + where.about),
    where.allowed ? make("p", {}, "No total counts this environment.") : null,
    make("p", {}, make("a", { href: evidence(number) }, `Evidence: ${where.name}.json`), " · ",
      make("a", { href: stackAddress({ stack: where.name, torch: "", model: name }) }, "as my stack")),
  ].filter(part => part !== null);
}

function withFa2patch(cell) {
  const parts = [];
  if (cell.reason) parts.push(make("p", { class: "reason" }, cell.reason, ...(cell.link ? [" ", make("a", { href: cell.link, rel: "noopener" }, "Reported here")] : [])));
  if (cell.checked.length) parts.push(list(cell.checked.map(run => [make("b", {}, run.name), ": " + run.held])));
  const said = (key, what) => {
    const by = new Map();
    for (const run of cell.checked) for (const [point, reason] of run[key]) {
      const line = `${point}: ${reason}`;
      by.set(line, [...(by.get(line) || []), run.name]);
    }
    const lines = [...by].map(([line, names]) => line + (names.length < cell.checked.length ? ` (${names.join(", ")})` : ""));
    return lines.length ? [what(lines)] : [];
  };
  parts.push(...said("failed", lines => fold(`What fails (${lines.length})`, list(lines))));
  parts.push(...said("unable", lines => make("div", { class: "unable" }, fold(`What Transformers alone fails at (${lines.length})`, list(lines)))));
  parts.push(...said("skipped", lines => fold("What does not apply or was not run, and why", list(lines))));
  return parts;
}

function alone(cell) {
  if (!cell.runs.length) return [make("p", {}, "Not run.")];
  const kinds = cell.runs[0].rows.map(([kind]) => kind), errors = new Set();
  const result = (run, row) => {
    const [state, ...said] = run.rows[row][1].split(": ");
    if (said.length) errors.add(said.join(": "));
    return make("td", { class: "result " + state }, `${MARK[state] || "?"} ${RESULT[state] || state}`);
  };
  const head = make("tr", {}, make("th", {}, "loaded as"), ...cell.runs.map(run => make("th", { scope: "col" }, run.name.replaceAll("_", "_\u200b"))));
  const rows = kinds.map((kind, row) => make("tr", {}, make("th", { scope: "row" }, kind), ...cell.runs.map(run => result(run, row))));
  return [make("div", { class: "wide" }, make("table", { class: "kinds" }, make("thead", {}, head), make("tbody", {}, ...rows))),
    ...(errors.size ? [fold("What the error says", list([...errors]))] : [])];
}

function stackAnswer({ stack, torch, model }) {
  const missing = [stack ? "" : "a Transformers release", model ? "" : "a model type"].filter(Boolean);
  if (missing.length) return [make("p", { class: "soft" }, `Choose ${missing.join(" and ")}.`)];
  const { name, resembling } = modelOf(model);
  if (!name) return [
    make("p", {}, `No model type “${model}” is in the matrix. The type is model_type in the model's config.json.`
      + (resembling.length ? " Similar:" : " The command fa2patch matrix --model config.json checks it on your machine.")),
    ...(resembling.length ? [list(resembling.map(other => make("a", { href: stackAddress({ stack, torch, model: other }) }, other)))] : []),
  ];
  const { number, notes } = environmentOf(stack, torch);
  const said = notes.map(note => make("p", { class: "note" }, note));
  if (number === undefined) return said;
  const cell = lookUp(name, number);
  if (!cell) return [...said, make("p", {}, absent(name, number))];
  return [
    ...said,
    list([[make("b", {}, "With fa2patch: "), cell.here],
      ...cell.told.map(([names, sentence]) => [make("b", {}, `Transformers alone, loaded as ${names}: `), sentence])]),
    make("p", {}, make("a", { href: cellAddress(name, number) }, `Everything about ${name} in ${environments[number].name}`), " · ",
      make("a", { href: evidence(number) }, "evidence")),
  ];
}

function absent(name, number) {
  const have = architectures.get(name).pairs.flatMap((pair, at) => (pair ? [environments[at].name] : []));
  return `${name} was not checked in ${environments[number].name}, because this version does not have it. `
    + `It was checked from ${have[0]} to ${have[have.length - 1]}.`;
}
