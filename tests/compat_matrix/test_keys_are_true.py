"""A planted fault turns red cells that their keys call stale, and none that its key calls fresh."""

import shutil

import pytest

from compat_matrix import environments, keys, run

RELEASE = "5.23.0"
CELLS = ("llama", "jamba", "bert:masked", "llava:picture")
POINTS = ("packed_row", "every_layout", "nothing_crosses", "refusals", "generation", "lengths")
ROOT = environments.HERE.parent

# File, text and fault. A file without a text is new. Each fault must turn at least one cell red.
FAULTS = {
    "a function of all: where documents start": (
        "fa2patch/documents/find.py", "given.real & _breaks(ids, step)", "given.real & (ids < 0)"),
    "a function of all: attention": (
        "fa2patch/kernels/reference.py", "of_keys.split(k), of_keys", "of_keys.split(k * 2), of_keys"),
    "a function of all: the kernel that calls it": (
        "fa2patch/kernels/reference.py", "options if options.scale == scale else replace(options, scale=scale))",
        "options if options.scale == scale else replace(options, scale=scale)) * 2"),
    "a method of all that is gone": (
        "fa2patch/upstream/packed_mask.py", "    def attend(", "    def attend_("),
    "a function of mixers: how outputs are joined": (
        "fa2patch/upstream/splitting.py",
        "return states.view(*self.shape, *states.shape[1:]) if self._in_rows(outputs) else states",
        "return 2 * states.view(*self.shape, *states.shape[1:]) if self._in_rows(outputs) else states"),
    "a function of mixers: one call": (
        "fa2patch/upstream/seams/mixer.py", "**way.more), args, kwargs)", "**way.more), args, {})"),
    "a function of pictures: how they are joined": (
        "fa2patch/data/processor_outputs.py", "def join_media(",
        "def join_media(*_): raise KeyError\ndef unjoined("),
    "a function of pictures: the row": (
        "fa2patch/data/processor_outputs.py", "def _without_row(value: Any) -> Any:",
        "def _without_row(value: Any) -> Any:\n    raise KeyError"),
    "a constant of all: the names of lengths": (
        "fa2patch/documents/names.py", '("cu_seq_lens_q", "cu_seq_lens_k",', '("cu_seq_lens_x", "cu_seq_lens_y",'),
    "a constant of all: the argument of masks": (
        "fa2patch/upstream/packed_mask.py", 'MASK = "attention_mask"', 'MASK = "attention_masks"'),
    "a constant of mixers: the argument that reaches them": (
        "fa2patch/upstream/find_layers.py", '_MASKS = ("attention_mask", "mask", "conv_mask")', '_MASKS = ("masks",)'),
    "a constant of what is registered": (
        "fa2patch/upstream/transformers_names.py", '("ALL_ATTENTION_FUNCTIONS",)', '("ALL_ATTENTION",)'),
    "a class body: a field's default": (
        "fa2patch/upstream/packed_mask.py", "    window: int | None = None", "    window: int | None = 2"),
    "a class body: another field's default": (
        "fa2patch/documents/boundaries.py", "    parents: torch.Tensor | None = None",
        "    parents: torch.Tensor | None = torch.zeros(1)"),
    "a class body: a line that is gone": (
        "fa2patch/kernels/reference.py", "    DEVICES = DTYPES = MAX_HEAD_DIM = None\n", ""),
    "a class body: a method that is new and hides one": (
        "fa2patch/kernels/reference.py", "    MULTIPLE = 1",
        "    MULTIPLE = 1\n\n    def __call__(self, *given, **named):\n        return given[0]"),
    "a definition that is new and hides one of Python's": (
        "fa2patch/documents/find.py", "def _changes(", "def bool(*given):\n    raise KeyError\n\n\ndef _changes("),
    "a decorator that is new": (
        "fa2patch/documents/find.py", "def _changes(", "@__import__('functools').cache\ndef _changes("),
    "a decorator that is gone": (
        "fa2patch/kernels/options.py", "@dataclass(frozen=True)\nclass Options", "class Options"),
    "a new file that hides another": (
        "fa2patch/documents/find/__init__.py", None, "raise ImportError('hidden')\n"),
    "a new file that a line imports": (
        "fa2patch/documents/find.py", "from __future__ import annotations",
        "from __future__ import annotations\nfrom . import new_file"),
}  # fmt: skip

# After each of these changes every cell is fresh.
HARMLESS = {
    "a docstring": ("fa2patch/cli/doctor.py", '"""', '"""Other: '),
    "a docstring of what is executed": ("fa2patch/documents/find.py", '"""Finds where', '"""Another text'),
    "a function of packing": ("fa2patch/packing/plans.py", "    return ", "    return None or "),
    "a field of a class that no cell makes": (
        "fa2patch/packing/units.py",
        "    most: int | None = None  # the most",
        "    most: int | None = 1  # the most",
    ),
    "a constant that no cell reads": ("fa2patch/packing/passes.py", "\n\n\nclass ", "\n\nLIMIT = 7\n\n\nclass "),
    "a comment": ("fa2patch/upstream/forward.py", "\n\n\n", "\n\n# here\n\n"),
}


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    # A copy of the code, an environment's Python, and the key of each cell.
    home = tmp_path_factory.mktemp("code")
    ignored = shutil.ignore_patterns("__pycache__", "evidence", "bench", "ecosystem")
    for package in ("fa2patch", "compat_matrix"):
        shutil.copytree(ROOT / package, home / package, ignore=ignored)
    python = environments.make(environments.version(RELEASE), ROOT / ".compat")
    known = {}
    for name, red, made in checked(home, python):
        assert not red, f"{name} is red without a fault: {red}"
        known[name] = keys.Sources(home).key(made["executed"])
    return home, python, known


def checked(home, python):
    """Yield each cell's name, what is red in it, and what it was made with."""
    check = ["compat_matrix.check", "--families", *CELLS, "--points", *POINTS]
    for name, parts in run.lines(python, home, {"without": check}):
        if name:
            cell = parts["without"]
            red = (
                {"error": cell["error"]}
                if "error" in cell
                else {"refused": cell["refused"]}
                if "refused" in cell
                else {}
            )
            for found in cell.get("fa2patch", {}).values():
                red.update(found.get("fail", {}))
            yield name, red, cell["made"]


def planted(home, file, old, new):
    path = home / file
    if old is None:
        path.parent.mkdir()
        path.write_text(new)
        return lambda: shutil.rmtree(path.parent)
    source = path.read_text()
    assert old in source, f"{file} has no {old!r}"
    path.write_text(source.replace(old, new, 1))
    return lambda: path.write_text(source)


@pytest.mark.parametrize("file, old, new", [*FAULTS.values(), *HARMLESS.values()], ids=[*FAULTS, *HARMLESS])
def test_what_is_changed_is_still_there(file, old, new):
    # Without this test only the slow tests would fail, in the night after the text was changed.
    assert (ROOT / file).exists() == (old is not None)
    assert old is None or old in (ROOT / file).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_turns_red_what_is_stale_and_nothing_that_is_fresh(copied, fault):
    home, python, known = copied
    assert set(known) == set(CELLS)
    restore = planted(home, *FAULTS[fault])
    try:
        sources = keys.Sources(home)
        stale = {name for name, key in known.items() if sources.changed(key)}
        try:
            red = {name for name, failures, _ in checked(home, python) if failures}
        except RuntimeError:  # nothing can be imported any more
            red = set(CELLS)
    finally:
        restore()
    assert red and red <= stale, f"red: {sorted(red)}, stale: {sorted(stale)}"


@pytest.mark.slow
@pytest.mark.parametrize("change", HARMLESS)
def test_what_no_cell_executes_makes_none_stale(copied, change):
    home, _, known = copied
    restore = planted(home, *HARMLESS[change])
    try:
        sources = keys.Sources(home)
        assert not any(sources.changed(key) for key in known.values())
    finally:
        restore()
