"""A sample executes everything that was changed, and has cells of every kind."""

from compat_matrix import keys, stale
from compat_matrix.cells import Cell, Checked, Environment, Made

MADE = ("1" * 12, False, "2.13.0", "2026-11-21T09:30:00+00:00", 1.0)


class Changed(keys.Sources):
    """Sources in which these items differ from every key."""

    def __init__(self, *items):
        self.items = items

    def changed(self, key):
        return [item for item in key if item in self.items]


def environment(name, **cells):
    # Each architecture has a seam, and items in its key.
    points = {"sdpa": Checked(9, {}, {}, {})}
    made = {
        architecture: Cell("ok", "", "", (seam,), points, (), Made(*MADE, dict.fromkeys(items, "then")))
        for architecture, (seam, *items) in cells.items()
    }
    return Environment(name, name, "3.11", "2.5", "none", "cpu", "reference", (), (), made)


OLD = environment("4.36.2", llama=("method", "a", "b"), phi=("method", "a"))
NEW = environment("5.0.0", llama=("interface", "a"), jamba=("mixer", "a", "c"), bert=("interface", "a", "d"))


def test_every_changed_item_is_executed_by_a_chosen_cell_also_if_that_takes_more():
    assert set(stale.sample([OLD, NEW], Changed("b", "c", "d"), 1)) == {
        ("4.36.2", "llama"), ("5.0.0", "jamba"), ("5.0.0", "bert"),
    }  # fmt: skip
    assert len(stale.sample([OLD, NEW], Changed("a"), 1)) == 1


def test_the_rest_are_of_the_kinds_that_are_not_there_yet():
    kinds = {"4.36.2 llama": "method", "4.36.2 phi": "method", "5.0.0 jamba": "mixer"}
    found = stale.sample([OLD, NEW], Changed(), 3)
    assert {kinds.get(" ".join(place), "interface") for place in found} == {"method", "mixer", "interface"}
    assert len(stale.sample([OLD, NEW], Changed(), 99)) == 5
