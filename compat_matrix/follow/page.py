"""Writes what changed as a page of Markdown that a person reads in a minute: what is new first, counts, then names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .. import diffable
from ..plans import Snapshots, differences
from ..tiny_models import OUT_OF_SCOPE
from .changes import RULES, Changes, folders, listed
from .sources import folder

MOST = 12  # rows of a table of names; the rest is counted

_CAUSAL = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"


def page(found: Changes, planned: tuple[Snapshots, Snapshots] | None = None) -> str:
    # planned: what apply finds in the architectures of both, if their environments were made
    parts = [f"# Transformers {found.after.release}, beside {found.before.release}", verdict(found)]
    if found.reds:
        parts.append(_decide(found))
    if found.accepted:
        parts.append(f"Accepted in seen.json: {listed((red.name for red in found.accepted), 8)}.")
    common = sorted(found.before.modeling.keys() & found.after.modeling.keys())
    changed = [path for path in common if found.before.files[path].text != found.after.files[path].text]
    both = found.before.forwards.keys() & found.after.forwards.keys()
    parts.append(
        f"{len(found.after.folders - found.before.folders)} new folders of models, {len(changed)} of {len(common)} "
        f"modeling files changed; {len(found.moved)} of {len(both)} forwards changed their arguments: "
        f"{len(found.gained)} names gained, {len(found.lost)} lost, {len(found.new)} of them never seen before."
    )
    if planned:
        parts.append(_plans(*planned))
    parts += [*_models(found), *_arguments(found), *_functions(found), *_sizes(found, changed)]
    return "\n\n".join(parts) + "\n"


def verdict(found: Changes) -> str:
    if not found.reds:
        return "**Green:** nothing that fa2patch must know is new."
    names = dict.fromkeys(red.name for red in found.reds)
    return f"**RED: {listed(names, 8)}.** A person must decide, before fa2patch says that it supports this release."


def _decide(found: Changes) -> str:
    lines = ["## What must be decided"]
    for rule, (meaning, remedy) in RULES.items():
        reds = [red for red in found.reds if red.rule == rule]
        lines += ["", f"**{rule}**: {meaning}. {remedy}", ""] if reds else []
        for red in reds:
            place = found.relied.get(red.name)
            spelled = f". fa2patch spells it in `{place}`" if place and rule != "gone" else ""
            lines.append(f"- `{red.name}`: {red.where}{spelled}")
    command = f"python -m compat_matrix.follow.watch {found.after.release} --accept NAME --because WHY"
    return "\n".join([*lines, "", f"`{command}` accepts a name: it writes the reason to seen.json."])


def _plans(before: Snapshots, after: Snapshots) -> str:
    new, gone = after.keys() - before.keys(), before.keys() - after.keys()
    both = {name: after[name] for name in before.keys() & after.keys()}
    differ = list(differences({name: before[name] for name in both}, both))
    lines = ["## Architectures of the matrix", "", f"{len(after)}; {len(before)} before."]
    lines += [f"- New: {listed(sorted(new), 99)}."] if new else []
    if gone:
        why = "They are gone, or claim no flash attention any more: see `tiny_models.is_present`."
        lines.append(f"- **No longer found: {listed(sorted(gone), 99)}.** {why}")
    lines.append(f"- `apply` finds something else in {len(differ)} of the {len(both)} of both releases.")
    lines += [f"  - {line}" for line in differ[:MOST]]
    return "\n".join(lines)


def _models(found: Changes) -> list[str]:
    had, has = (each.tables.get("CONFIG_MAPPING_NAMES", {}).keys() for each in (found.before, found.after))
    new, gone = has - had, had - has
    tables = {name: rows for name, rows in found.after.tables.items() if name.startswith("MODEL_")}
    lines = ["## Model types", ""]
    for name in sorted(new):
        classes = dict.fromkeys(rows[name] for rows in tables.values() if name in rows)
        homes = {found.after.homes.get(cls) for cls in classes} - {None}
        # a folder of fewer words may be a model type's own: llava_text is in llava
        words = name.replace("-", "_").split("_")
        own = {"_".join(words[: count + 1]) for count in range(len(words))}
        elsewhere = homes and not any((found.after.homes.get(cls) or name) in own for cls in classes)
        said = f", of the folder {listed(sorted(map(str, homes)), 8)}" if elsewhere else ""
        causal = " (a causal LM)" if name in tables.get(_CAUSAL, {}) else ""
        because = f"; not checked: {OUT_OF_SCOPE[name]}" if name in OUT_OF_SCOPE else ""
        lines.append(f"- `{name}`{causal}: {listed(classes, 3) or 'a configuration without a model'}{said}{because}")
    moved = sorted(
        f"`{name}`: `{had[name]}`, now `{rows[name]}`"
        for table, rows in tables.items()
        for had in [found.before.tables.get(table, {})]
        for name in had.keys() & rows.keys()
        if had[name] != rows[name]
    )
    lines += [f"- gone: {listed(sorted(gone), 99)}"] if gone else []
    lines += [f"- other class: {text}" for text in dict.fromkeys(moved)]
    return ["\n".join(lines)] if len(lines) > 2 else []


def _arguments(found: Changes) -> list[str]:
    lines = []
    moves = {name: (found.gained.get(name, []), found.lost.get(name, [])) for name in {*found.gained, *found.lost}}
    names = sorted(moves, key=lambda name: (-sum(map(len, moves[name])), name))
    for name in names[:MOST]:
        notes = ["never seen before"] if name in found.new else []
        notes += [f"fa2patch: `{found.relied[name]}`"] if name in found.relied else []
        lines.append([f"`{name}`", *map(_where, moves[name]), "; ".join(notes)])
    rest = []
    if names[MOST:]:
        most = max(len(places) for name in names[MOST:] for places in moves[name])
        rest = [f"{len(names) - MOST} more names moved in {most} forwards or fewer each."]
    own = sorted(found.new - found.gained.keys())
    rest += [f"Only in new classes, never seen before: {listed(own, 40)}."] if own else []
    head = ["argument", "gained in", "lost in", ""]
    return [*(["## Arguments of forwards", diffable.table(head, lines)] if names else []), *rest]


def _where(places: Sequence[tuple[str, str]]) -> str:
    named = folders(places)
    if len(named) > 3:
        return f"{len(places)} forwards, {len(named)} folders"
    return f"{len(places)}: {', '.join(named)}" if places else ""


def _functions(found: Changes) -> list[str]:
    lines = []
    for path, file in found.after.files.items():
        had = found.before.files.get(path)
        if path in found.after.modeling or had is None:
            continue
        for name in sorted(file.functions.keys() & had.functions.keys() & found.relied.keys()):
            now, then = file.functions[name], had.functions[name]
            new, gone = ([each for each in these if each not in those] for these, those in ((now, then), (then, now)))
            said = "; ".join(f"{word} {listed(names, 8)}" for word, names in (("new", new), ("gone", gone)) if names)
            if said:
                lines.append(f"- `{path}`, `{name}`: {said}. fa2patch: `{found.relied[name]}`")
    return ["\n".join(["## Functions of the library that fa2patch names", "", *lines])] if lines else []


def _sizes(found: Changes, changed: Sequence[str]) -> list[str]:
    added, removed = Counter[str](), Counter[str]()
    for path in changed:
        now, then = (Counter(each.files[path].text.splitlines()) for each in (found.after, found.before))
        added[folder(path)] += sum((now - then).values())
        removed[folder(path)] += sum((then - now).values())
    both = added + removed
    top = sorted(both, key=lambda name: (-both[name], name))[:MOST]
    if not top:
        return []
    lines = [f"`{name}` +{added[name]} -{removed[name]}" for name in top]
    lead = f"## Modeling sources\n\n{sum(added.values())} lines are new and {sum(removed.values())} gone in "
    return [f"{lead}{len(both)} folders that were there before. Most in: {', '.join(lines)}."]
