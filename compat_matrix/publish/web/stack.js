// "My stack": which checked environment stands for a release and a torch that somebody typed, and what must be said.

// { number, notes }, or { notes } if nothing that was checked stands for it.
function environmentOf(release, torch) {
  const named = environments.findIndex(each => each.name === release);
  const numbers = data.minors[(/^v?(\d+\.\d+)(\D|$)/.exec(release) || [])[1]];
  if (named < 0 && !numbers) {
    const known = Object.keys(data.minors), last = known[known.length - 1];
    if (isNewer(release, last)) return { notes: [`Transformers ${release} is newer than ${last}, the last minor version that was checked. Nothing is known of it here. The documentation's page "My Transformers is newer than yours" says what fa2patch checks itself, and how to check your model.`] };
    return { notes: [`Transformers ${release} was not checked. The minor versions ${known[0]} to ${last} were.`] };
  }
  const candidates = numbers && !release.includes("-") ? numbers : [named];
  const number = closest(candidates, torch), notes = [];
  const found = environments[number];
  const asked = release.replace(/^v/, "");
  if (asked !== found.release && asked !== found.name) notes.push(/^\d+\.\d+$/.test(asked)
    ? `${found.release} is the release of ${asked} that was checked.`
    : `Transformers ${asked} itself was not checked. These are the results of ${found.release}, the checked release of the same minor version.`);
  if (torch && !sameTorch(torch, found.torch)) notes.push(`This was checked with torch ${found.torch}, not with torch ${torch}.`);
  return { number, notes };
}

// Whether a release such as v6.0.1 is behind a minor version such as 5.23.
function isNewer(release, minor) {
  const [asked, last] = [release.replace(/^v/, ""), minor].map(text => text.split(".").map(Number));
  return asked[0] > last[0] || (asked[0] === last[0] && asked[1] > last[1]);
}

// The environment with this torch, else one with the same minor of it, else the first.
function closest(candidates, torch) {
  const minor = torch.split(".").slice(0, 2).join(".");
  const by = test => candidates.find(number => test(environments[number].torch));
  const found = torch && (by(found => sameTorch(torch, found)) ?? by(found => sameTorch(minor, found)));
  return found ?? candidates[0];
}

// Whether 2.4, 2.4.1 or 2.4.1+cu121 names the torch 2.4.1.
function sameTorch(asked, found) {
  const number = asked.split("+")[0].replace(/^v/, "");
  return number === found || found.startsWith(number + ".");
}

// The architecture of this name, else those whose names resemble it: Qwen2.5-7B resembles qwen2.
function modelOf(typed) {
  const name = typed.toLowerCase();
  if (architectures.has(name)) return { name, resembling: [] };
  const plain = word => word.toLowerCase().replace(/:.*/, "").replace(/[^a-z0-9]/g, "");
  const asked = plain(name.split("/").pop());
  const resembling = [...architectures.keys()].filter(other => asked && (plain(other).includes(asked) || asked.startsWith(plain(other))));
  const score = other => -Math.abs(plain(other).length - asked.length);
  return { resembling: resembling.sort((a, b) => score(b) - score(a)).slice(0, 8) };
}
