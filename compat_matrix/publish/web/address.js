// What the part of the address after # means.
//   #llama-4.43.4                              a cell
//   #llama                                     the rows whose names hold this word
//   #stack=4.46.1&torch=2.5&model=qwen2        a stack

function read(hash) {
  let words = hash.replace(/^#/, "");
  if (words.startsWith("stack=")) {
    const asked = new URLSearchParams(words);
    return { stack: Object.fromEntries(["stack", "torch", "model"].map(key => [key, (asked.get(key) || "").trim()])) };
  }
  try { words = decodeURIComponent(words); } catch { return { unknown: words }; }
  if (!words) return {};
  for (const [name, { pairs }] of architectures) {
    if (!words.startsWith(name + "-")) continue;
    const number = environments.findIndex(each => each.name === words.slice(name.length + 1));
    if (number >= 0) return pairs[number] ? { cell: { name, number } } : { absent: { name, number } };
  }
  return architectures.has(words) ? { rows: words } : { unknown: words };
}

const cellAddress = (name, number) => `#${name}-${environments[number].name}`;
const stackAddress = ({ stack, torch, model }) =>
  "#" + new URLSearchParams({ stack, ...(torch && { torch }), ...(model && { model }) });
