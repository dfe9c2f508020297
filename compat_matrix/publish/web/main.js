// What the address says is what the page shows.

const at = id => document.getElementById(id);
const panel = at("panel"), fields = { stack: at("stack"), torch: at("torch"), model: at("model") };
let byKeyboard = false;  // the last cell was opened with the keyboard, so the focus follows

function show() {
  const said = read(location.hash);
  at("unknown").hidden = !("unknown" in said || said.absent);
  if ("unknown" in said) at("unknown").textContent = `The address #${said.unknown} is not known here. A cell's address is a model type and a version, for example #llama-4.43.4.`;
  if (said.absent) at("unknown").textContent = absent(said.absent.name, said.absent.number);
  if (said.stack) for (const [name, field] of Object.entries(fields)) field.value = said.stack[name];
  if (said.rows) at("filter").value = said.rows;
  if (said.rows) sort();
  if (said.cell) open(said.cell);
  else close();
  answer();
}

function open({ name, number }) {
  if (!shown.includes(architectures.get(name))) { at("filter").value = ""; choose(null); sort(); }
  at("panel-title").textContent = `${name} in Transformers ${environments[number].name}`;
  at("panel-body").replaceChildren(...cellPanel(name, number));
  panel.hidden = false;
  panel.scrollTop = 0;
  document.body.classList.add("open");
  light(name, number);
  if (byKeyboard) at("panel-title").focus();
  byKeyboard = false;
}

function close() {
  panel.hidden = true;
  document.body.classList.remove("open");
  light(null);
}

function leave() {
  const [cell] = lit;
  history.pushState(null, "", location.pathname + location.search);
  show();
  if (cell) cell.firstChild.focus({ preventScroll: true });
}

const stackNow = () => Object.fromEntries(Object.entries(fields).map(([name, field]) => [name, field.value.trim()]));
const asked = () => Object.values(stackNow()).some(Boolean);
function answer() {
  at("answer").hidden = !asked();
  if (asked()) at("answer").replaceChildren(...stackAnswer(stackNow()));
}

function sort() {
  arrange(at("filter").value, at("order").value);
  at("count").textContent = shown.length === architectures.size ? `${shown.length} model types` : `${shown.length} of ${architectures.size} model types`;
}

function choose(button) {
  for (const other of document.querySelectorAll(".legend button")) other.setAttribute("aria-pressed", String(other === button));
  only = button && { side: button.dataset.side, state: button.dataset.state };
}

function turn(to) {
  side = to;
  for (const half of document.querySelectorAll(".half")) half.classList.toggle("chosen", half.dataset.side === side);
  for (const legend of document.querySelectorAll(".legend")) legend.hidden = legend.dataset.side !== side;
  choose(null);
  paint();
  sort();
}

for (const [id, values] of [
  ["stacks", environments.map(each => each.name).reverse()],
  ["torches", [...new Set(environments.map(each => each.torch))]],
  ["models", [...architectures.keys()]],
]) at(id).append(...values.map(value => make("option", { value })));

draw(at("map"));
for (const link of document.querySelectorAll("a[data-file]")) link.href = file(link.dataset.file);
for (const choice of document.querySelectorAll("input[name=side]")) choice.addEventListener("change", () => turn(choice.value));
for (const button of document.querySelectorAll(".legend button")) button.addEventListener("click", () => {
  choose(button.getAttribute("aria-pressed") === "true" ? null : button);
  sort();
});
for (const field of Object.values(fields)) field.addEventListener("input", () => {
  history.replaceState(null, "", asked() ? stackAddress(stackNow()) : location.pathname + location.search);
  show();
});
at("filter").addEventListener("input", sort);
at("order").addEventListener("change", sort);
at("close").addEventListener("click", leave);
at("stack-form").addEventListener("submit", event => event.preventDefault());
body.addEventListener("keydown", event => {
  if (!(event.key in STEPS) || !event.target.closest("td")) return;
  event.preventDefault();
  step(event.target, event.key);
});
body.addEventListener("click", event => {
  const link = event.target.closest("td a");
  byKeyboard = Boolean(link) && event.detail === 0;
});
for (const kind of ["mouseover", "focusin"]) body.addEventListener(kind, event => {
  const link = event.target.closest("td a");
  if (link) at("hint").textContent = link.getAttribute("aria-label");
});
document.addEventListener("keydown", event => { if (event.key === "Escape" && !panel.hidden) leave(); });
addEventListener("hashchange", show);

turn("here");
at("page").hidden = false;
at("map").scrollLeft = at("map").scrollWidth;  // the newest versions are on the right
show();
