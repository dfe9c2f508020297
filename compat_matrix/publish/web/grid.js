// The map: a row for each architecture, a column for each environment; every cell is a link to its address.

const WORDS = JSON.parse(document.getElementById("words").textContent);
const body = make("tbody"), heads = [], cells = new Map(), key = (name, number) => `${name}-${number}`;
let side = "here", shown = [], only = null, lit = [];

const classes = (...names) => names.filter(Boolean).join(" ");
const column = (each, ...more) => classes("v", each.band && "band", each.allowed && "allowed", ...more);

function draw(map) {
  const corner = make("th", { class: "name", scope: "col" }, "model type");
  for (const each of environments) heads.push(make("th", { class: column(each), scope: "col", title: each.name }, make("span", {}, each.label)));
  const columns = environments.map(each => make("col", { class: column(each) }));
  const onGpu = make("th", { class: "v band", scope: "col", title: "the newest result on a GPU" }, make("span", {}, "on a GPU"));
  for (const row of architectures.values()) {
    row.since = row.pairs.findIndex(Boolean);
    row.states = environments.map((_, number) => states(row.name, number));
    row.trouble = row.states.filter(state => state && state.here !== "ok").length;
    row.element = make("tr", {}, make("th", { class: "name", scope: "row", title: row.name }, row.name),
      ...environments.map((each, number) => square(row, number)), gpuSquare(row.name));
  }
  map.append(make("table", { class: "map", "aria-label": "Model types by Transformers version" },
    make("colgroup", {}, make("col", { class: "name" }), ...columns, make("col", { class: "v band" })), make("thead", {}, make("tr", {}, corner, ...heads, onGpu)), body));
}

// When, on which card and with which kernel is told by the square's title, and by the panel of the architecture.
function gpuSquare(name) {
  const [state, said] = data.gpu[name] || ["absent", "not run on a GPU"];
  return make("td", { class: classes("v band", state), title: said });
}

function square(row, number) {
  if (!row.pairs[number]) return make("td", { class: column(environments[number], "absent") });
  const link = make("a", { href: cellAddress(row.name, number), tabindex: -1 });
  const cell = make("td", { class: column(environments[number]) }, link);
  cells.set(key(row.name, number), { link, cell });
  return cell;
}

// Colours and names of all cells for the side that is shown.
function paint() {
  for (const row of architectures.values()) row.states.forEach((state, number) => {
    if (!state) return;
    const { link, cell } = cells.get(key(row.name, number));
    cell.className = column(environments[number], state[side], state.older && "older");
    link.setAttribute("aria-label", `${row.name} in ${environments[number].name}: ${WORDS[side][state[side]]}${state.older ? ", checked with older code" : ""}`);
  });
}

// Which rows are shown, in which order.
function arrange(words, order) {
  const asked = words.toLowerCase().split(/[\s,]+/).filter(Boolean);
  const by = { families: (a, b) => b.family - a.family, name: () => 0, since: (a, b) => a.since - b.since, trouble: (a, b) => b.trouble - a.trouble }[order];
  shown = [...architectures.values()]
    .filter(row => !asked.length || asked.some(word => row.name.includes(word)))
    .filter(row => !only || row.states.some(state => state && state[only.side] === only.state))
    .sort((a, b) => by(a, b) || (a.name < b.name ? -1 : 1));
  body.replaceChildren(...shown.map(row => row.element));
  const first = shown.length && cells.get(key(shown[0].name, shown[0].since));
  if (first && !body.querySelector("a[tabindex='0']")) rove(first.link);
}

function rove(link) {
  for (const before of body.querySelectorAll("td a[tabindex='0']")) before.tabIndex = -1;
  link.tabIndex = 0;
}

function light(name, number) {
  for (const element of lit) element.classList.remove("lit");
  const found = name && cells.get(key(name, number));
  lit = found ? [found.cell, architectures.get(name).element, heads[number]] : [];
  for (const element of lit) element.classList.add("lit");
  if (!found) return;
  rove(found.link);
  found.cell.scrollIntoView({ block: "nearest", inline: "nearest" });
}

const STEPS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], PageUp: [0, -20], PageDown: [0, 20] };

// The next cell in the direction of an arrow key, over cells that do not exist.
function step(link, pressed) {
  const cell = link.closest("td"), row = link.closest("tr");
  let x = [...row.children].indexOf(cell) - 1, y = shown.findIndex(each => each.element === row);
  const [dx, dy] = STEPS[pressed];
  const inside = () => shown[y] && x >= 0 && x < environments.length;
  do { x += dx; y = Math.abs(dy) > 1 ? Math.max(0, Math.min(shown.length - 1, y + dy)) : y + dy; } while (inside() && !shown[y].pairs[x] && Math.abs(dy) < 2);
  const found = inside() && cells.get(key(shown[y].name, x));
  if (found) { rove(found.link); found.link.focus(); }
}
