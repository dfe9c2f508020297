"""Makes README's table *Do I need it?*: what Transformers alone does in a user's case, by bands of versions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from fa2patch.evidence import stretches

from ..cells import Environment, Results
from . import words

# The first minor of each column of the table: within a column, nearly every case has one result.
STARTS = ((4, 34), (4, 44), (4, 53), (5, 0))

# the families that the table is about, with the names shown
SEEDS = {
    "llama": "Llama", "mistral": "Mistral", "mixtral": "Mixtral", "falcon": "Falcon", "phi": "Phi", "phi3": "Phi-3",
    "qwen2": "Qwen2", "qwen2_moe": "Qwen2MoE", "gemma": "Gemma", "stablelm": "StableLM", "starcoder2": "StarCoder2",
    "olmo": "OLMo", "dbrx": "DBRX", "granite": "Granite",
}  # fmt: skip

MIXERS = ()  # in place of names: all architectures with mixers


# an architecture, a minor, and "ok", "leak" or "error"
Outcome = tuple[str, tuple[int, int], str]


@dataclass(frozen=True)
class Case:
    title: str  # what the user does
    architectures: tuple[str, ...]  # MIXERS stands for all with mixers
    implementations: tuple[str, ...] = ()  # the ways in which the model is loaded; empty takes all that were run
    rows: tuple[str, ...] = ("one row",)  # kinds of packed row
    slow: bool = False  # what is right is also slow
    untested: str = ""  # the result in every version, where the evidence has no such row


_FLASH, _MASKED = ("flash_attention_2",), ("sdpa", "eager")
CASES = (
    Case("flash attention: one packed row", tuple(SEEDS), _FLASH, slow=True),
    Case("flash attention: several packed rows in a batch", tuple(SEEDS), _FLASH, ("two rows",), slow=True),
    Case("sdpa or eager: one packed row, no cache", tuple(SEEDS), _MASKED, slow=True),
    Case("sdpa or eager: default cache, or a mask of ones", tuple(SEEDS), _MASKED, ("mask of ones", "default cache")),
    # A mask with a zero wins over position_ids. The fourteen families leaked with all three implementations in 4.43.4,
    # 4.44.2, 4.52.4, 4.53.3, 4.54.1, 4.57.6, 5.0.0 and 5.23.0.
    Case("padding behind the examples, with its mask", tuple(SEEDS), untested="leak"),
    Case("hybrids (Mamba, Jamba, Qwen3-Next)", MIXERS),
    # Their flash attention never gets position_ids.
    Case("GPT-Neo, GPT-J, GPT-BigCode: flash attention", ("gpt_neo", "gptj", "gpt_bigcode"), _FLASH),
)
_WORDS = {"ok": "right", "leak": "**leaks**", "error": "an error"}


def table(results: Results) -> str:
    columns = words.bands(results.counted, STARTS)
    families, hybrids = (
        Counter(each.cell(name).state for each in results.counted for name in names if name in each.cells)
        for names in (SEEDS, mixers(results))
    )
    rows = ([case.title, *(cell(case, band, results) for band in columns)] for case in CASES)
    head = ["your case", *map(words.label, columns)]
    return words.rendered("need.md.jinja", names=SEEDS.values(), head=head, rows=rows, of=(families, hybrids)).rstrip()


def cell(case: Case, environments: Iterable[Environment], results: Results) -> str:
    if case.untested:
        return _WORDS[case.untested]
    found = outcomes(case, environments, results)
    counted = Counter(result for _, _, result in found)
    if not counted:
        return "not in these versions"
    main = counted.most_common(1)[0][0]
    slow = ", slow" if case.slow and main == "ok" else ""
    others = [_exception(found, result) for result in counted if result != main]
    return "; ".join([*others, f"{'else ' if others else ''}{_WORDS[main]}{slow}"])


def outcomes(case: Case, environments: Iterable[Environment], results: Results) -> list[Outcome]:
    names = case.architectures or mixers(results)
    return [
        (name, environment.minor, run.rows[row].partition(":")[0])
        for environment in environments
        for name in names
        for run in environment.cell(name).alone
        if not case.implementations or run.implementation in case.implementations
        for row in case.rows
        if row in run.rows
    ]


def mixers(results: Results) -> tuple[str, ...]:
    return tuple(
        name for name in results.architectures if any("mixer" in each.cell(name).seam for each in results.counted)
    )


def _exception(found: list[Outcome], result: str) -> str:
    # It is such as "right in 4.54", "**leaks** in Falcon" or "an error in 8 of 14 model types".
    minors = sorted({minor for _, minor, _ in found})
    having = {minor for _, minor, other in found if other == result}
    if not having & {minor for _, minor, other in found if other != result}:
        return f"{_WORDS[result]} in {_spans(minors, having)}"
    families = dict.fromkeys(name for name, _, other in found if other == result)
    if len(families) > 4:
        return f"{_WORDS[result]} in {len(families)} of {len({name for name, _, _ in found})} model types"
    where = []
    for name in families:  # the minors are named if the family has another result in others
        minors = sorted({minor for other, minor, _ in found if other == name})
        having = {minor for other, minor, at in found if (other, at) == (name, result)}
        where.append(SEEDS.get(name, name) + ("" if having == {*minors} else f" ({_spans(minors, having)})"))
    return f"{_WORDS[result]} in {', '.join(where)}"


def _spans(minors: list[tuple[int, int]], having: set[tuple[int, int]]) -> str:
    return ", ".join(words.span(*run) for run in stretches(minors, having))
