"""Segments that do not see what they continue, although they do when their path is run alone."""

from __future__ import annotations

from .compared import Run


def named(run: Run, at: int) -> str:
    """A span as findings name it: ``"document 2"``, or ``"segment 2"`` in a batch with parents."""
    return f"{run.word} {run.number(at)}"


def unshared(run: Run, bound: float) -> tuple[str, int]:
    """What is wrong, in words, and the first segment that does not depend on an ancestor; empty if all do.

    A window, or a state that forgets, may keep a segment from an ancestor rightly. So the path alone decides: nothing
    is said of a segment that does not depend on the ancestor there either.

    Args:
        run: the runs, compared.
        bound: the largest change that counts as none.
    """
    for (at, ancestor), change in run.followed.items():
        if change <= bound and run.dependence_alone(at, ancestor)[0] - change > bound:
            return f"{named(run, at)} does not depend on {_ancestor(run, at, ancestor)}", at
    for (at, ancestor), gradient in run.reached.items():
        if gradient == 0 and run.dependence_alone(at, ancestor)[1] > 0:
            return f"{named(run, at)} sends no gradient to {_ancestor(run, at, ancestor)}", at
    return "", -1


def _ancestor(run: Run, at: int, ancestor: int) -> str:
    near = run.spans[at].parent == ancestor
    return f"its parent, {named(run, ancestor)}" if near else f"{named(run, ancestor)}, which it continues"
