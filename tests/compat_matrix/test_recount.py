"""The published counts are counted again from the JSON files, with no code of ``compat_matrix``.
``python tests/compat_matrix/test_recount.py`` prints the counts.
"""

import functools
import json
import re
import sys
from collections import Counter
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
CORE = {
    "every_layout", "inertness", "lengths", "no_dense_mask", "nothing_crosses", "packed_row", "packed_rows", "padding",
    "refusals", "reverted",
}  # fmt: skip
ON_TEXT = "checked on rows of text"
VOUCHED = "vouched for by "


def files():
    for file in sorted((ROOT / "compat_matrix" / "evidence").glob("*.json")):
        yield json.loads(file.read_text(encoding="utf-8"))


@functools.cache
def known_failures():
    return tomllib.loads((ROOT / "compat_matrix" / "xfail.toml").read_text())["xfail"]


def is_known(name, version, cell):
    # A cell without failures is not a known failure.
    failed = [what for run in cell["fa2patch"].values() for what in run.get("fail", {}).items()]
    if not any(run.get("ok") for run in cell["fa2patch"].values()):
        failed += [what for run in cell["fa2patch"].values() for what in run.get("alone", {}).items()]
    for entry in known_failures():
        of = name in entry["architectures"] and any(f"{version}.".startswith(f"{each}.") for each in entry["versions"])
        if of and failed and all(point in entry["points"] and entry["error"] in what for point, what in failed):
            return True
    return False


def states(data):
    found = {
        name: "xfail" if "fa2patch" in cell and is_known(name, data["transformers"], cell) else
        state(cell, cell.get("points", data["points"]))
        for name, cell in data["architectures"].items()
    }  # fmt: skip
    for name, cell in data["architectures"].items():
        reasons = [reason for run in cell.get("fa2patch", {}).values() for reason in run.get("n/a", {}).values()]
        vouchers = {reason[len(VOUCHED) :] for reason in reasons if reason.startswith(VOUCHED)}
        if found[name] == "ok" and any(found.get(voucher) != "ok" for voucher in vouchers):
            found[name] = "fail"
    return found


def state(cell, points):
    for word, meant in (("error", "fail"), ("refused", "refused")):
        if word in cell:
            return meant
    not_held = dict.fromkeys(CORE & set(points), ())
    ran = False
    for run in cell["fa2patch"].values():
        without = {**run.get("n/a", {}), **run.get("alone", {})}
        if run.get("fail"):
            return "fail"
        if not run.get("ok") and set(without) <= {"load", "document"}:
            continue
        if run.get("ok", 0) + len(without) != len(points):
            return "fail"
        ran = ran or bool(run["ok"])
        for point in not_held:
            not_held[point] += (without.get(point, "held"),)
    held = all(
        "held" in reasons or ON_TEXT in reasons or all(each.startswith(VOUCHED) for each in reasons)
        for reasons in not_held.values()
    )
    return "ok" if ran and held else "fail"


def counts():
    found, releases, rows = Counter(), set(), Counter()
    for data in files():
        found["cells"] += len(data["architectures"])
        if data["name"] != data["transformers"] or data.get("allowed_to_fail"):
            continue
        releases.add(data["transformers"])
        found.update(states(data).values())
        for name, cell in data["architectures"].items():
            alone = cell.get("upstream") or {}
            first = next((alone[name] for name in ("flash_attention_2", "sdpa", *alone) if name in alone), None)
            if first is not None:
                plain = first.get("one row", "unknown").partition(":")[0]
                rows[plain] += 1
                wanted = 3 if name.endswith((":picture", ":sound", ":pairs")) else 5
                rows["every"] += [*first.values()] == ["ok"] * wanted
    found["counted"] = sum(found[name] for name in ("ok", "refused", "xfail", "fail"))
    return {**found, "releases": len(releases), **{f"alone {name}": count for name, count in rows.items()}}


def numbers(text):
    return [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", text)]


def test_readmes_counts_are_those_of_the_files():
    found = counts()
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = " ".join(text.split("<!-- matrix:begin -->")[1].split("<!-- matrix:end -->")[0].split())
    assert f"isolated {found['ok']:,} of {found['counted']:,} combinations" in block
    assert f"({found['releases']} releases, on a CPU)" in block
    assert f"refused {found.get('refused', 0):,} " in block and f"{found.get('xfail', 0):,} were known" in block
    assert f"Without fa2patch, {found['alone ok']:,} of them keep the examples of one packed row apart" in block
    assert f"Only {found['alone every']:,} also do so with several rows" in block
    days = sorted(cell["made"]["when"][:10] for data in files() for cell in data["architectures"].values())
    when = f"on {days[0]}" if days[0] == days[-1] else f"from {days[0]} to {days[-1]}"
    assert f"{found['cells']:,} cells were checked {when}" in block


def test_the_matrixs_totals_are_those_of_the_files():
    found = counts()
    text = (ROOT / "compat_matrix" / "MATRIX.md").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith("| **all** |"))
    isolated, refused, known, failing, _absent, plain, leaks, error, every = numbers(line)
    assert (isolated, refused, known, failing) == tuple(
        found.get(name, 0) for name in ("ok", "refused", "xfail", "fail")
    )
    alone = tuple(found[f"alone {name}"] for name in ("ok", "leak", "error", "every"))
    assert (plain, leaks, error, every) == alone


if __name__ == "__main__":
    print(json.dumps(counts(), indent=1))
