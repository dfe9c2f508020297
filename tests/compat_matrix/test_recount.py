"""The published counts are counted again from the JSON files, with no code of ``compat_matrix``.

It can be run alone, too: ``python tests/compat_matrix/test_recount.py`` prints the counts.
"""

import json
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE = {
    "every_layout", "inertness", "lengths", "no_dense_mask", "nothing_crosses", "packed_row", "packed_rows", "padding",
    "refusals", "reverted",
}  # fmt: skip
ON_TEXT = "checked on rows of text"


def files():
    for file in sorted((ROOT / "compat_matrix" / "evidence").glob("*.json")):
        yield json.loads(file.read_text(encoding="utf-8"))


def state(cell, points):
    """The state of a cell, decided anew."""
    for word, meant in (("error", "fail"), ("refused", "refused"), ("xfail", "xfail")):
        if word in cell:
            return meant
    if set(cell.get("expected_seam", cell["seam"])) != set(cell["seam"]):
        return "fail"
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
    held = all("held" in reasons or set(reasons) == {ON_TEXT} for reasons in not_held.values())
    return "ok" if ran and held else "fail"


def counts():
    """The numbers that are published, by their names here."""
    found, releases, rows = Counter(), set(), Counter()
    for data in files():
        found["cells"] += len(data["architectures"])
        if data["name"] != data["transformers"] or data.get("allowed_to_fail"):
            continue
        releases.add(data["transformers"])
        for name, cell in data["architectures"].items():
            found[state(cell, cell.get("points", data["points"]))] += 1
            alone = cell.get("upstream") or {}
            first = next((alone[name] for name in ("flash_attention_2", "sdpa", *alone) if name in alone), None)
            if first is not None:
                plain = first.get("one row", "unknown").partition(":")[0]
                rows[plain] += 1
                wanted = 3 if name.endswith((":picture", ":sound")) else 5
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
    assert f"right in {found['alone ok']:,} of them for one packed row, and in {found['alone every']:,} for" in block
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
