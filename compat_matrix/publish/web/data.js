"use strict";
// The evidence, as page.py makes it. A cell is looked up by architecture and by the number of the environment.
const data = JSON.parse(document.getElementById("data").textContent);
const HERE = ["ok", "refused", "xfail", "fail", "absent"], ALONE = ["ok", "plain", "leak", "error", "unknown"];
const environments = data.environments;
const text = number => data.texts[number];

const architectures = new Map(data.architectures.map(([name, family, pairs]) => [name, { name, family, pairs }]));

// What one cell holds, with texts in the place of numbers; null if the version does not have the architecture.
function lookUp(name, number) {
  const pair = architectures.get(name).pairs[number];
  if (!pair) return null;
  const [state, verdict, here, told, reason, link, checked] = data.cells[pair[0]];
  const [alone, runs] = data.runs[pair[1]];
  const pairs = list => list.map(([key, value]) => [text(key), text(value)]);
  return {
    state: HERE[state], verdict: text(verdict), here: text(here), told: pairs(told), reason: text(reason),
    link: text(link), alone: ALONE[alone], made: text(data.made[pair[2]][0]),
    checked: checked.map(([name, ok, held, skipped, unable, failed]) =>
      ({ name: text(name), ok, held: text(held), skipped: pairs(skipped), unable: pairs(unable), failed: pairs(failed) })),
    runs: runs.map(([name, rows]) => ({ name: text(name), rows: pairs(rows) })),
  };
}

// The two states of a cell, and whether older code made it, for the map.
function states(name, number) {
  const pair = architectures.get(name).pairs[number];
  return pair ? { here: HERE[data.cells[pair[0]][0]], alone: ALONE[data.runs[pair[1]][0]], older: data.made[pair[2]][1] } : null;
}

// Where a file of the repository is: beside this page in a clone, else in the repository on the web.
const file = name => (location.protocol === "file:" ? name : `${data.folder}/${name}`);
const evidence = number => file(`evidence/${environments[number].name}.json`);

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== false) element.setAttribute(name, value);
  element.append(...children.filter(child => child !== null));
  return element;
}
