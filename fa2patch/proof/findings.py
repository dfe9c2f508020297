"""What the runs of ``verify`` say about a model: whether it isolates documents, and which module does not.

With shared prompts, they also say whether segments see what they continue.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._types import Call
from ..documents.names import IGNORED_LABEL
from ..patch.applying import status
from ..probing import locate
from ..probing.probe import NEAR, NEAR_IN_HALF, ROUNDING, is_mixture, outputs
from ..probing.whole_rows import WholeRows
from .compared import Run
from .result import Document, Verification

_OTHER = {"document": "", "segment": ", which it does not continue"}
_ALONE = {"document": "it is", "segment": "its path is"}


class Finding(NamedTuple):
    """What is wrong with a model.

    Attributes:
        reason: the finding in words; empty if nothing is wrong.
        module: the name of the first module that leaks, or None.
        cls: the name of its class, or None.
    """

    reason: str
    module: str | None = None
    cls: str | None = None


def verification(run: Run) -> Verification:
    """Run everything that is compared, and say what was found.

    Raises:
        PackingNotIsolated: the outputs of a document do not depend on its own tokens.
    """
    run.compare()
    bound, near = _bounds(run)
    documents = tuple(_document(run, at) for at, span in enumerate(run.spans) if span.real)
    reason, module, cls = _finding(run, bound, near)
    return Verification(not reason, documents, module, cls, reason, bound, near, status(run.inner) is not None)


def _document(run: Run, at: int) -> Document:
    span = run.spans[at]
    change, by = run.moved[at]
    moved_by = None if by is None else run.number(by)
    parent = run.number(span.parent) if span.parent >= 0 else None
    gradient, distance = run.gradients.get(at), run.distances.get(at)
    return Document(span.row, span.start, span.length, change, moved_by, gradient, distance, parent)


def _bounds(run: Run) -> tuple[float, float]:
    """The largest change and the largest distance that are accepted."""
    return ROUNDING.get(run.dtype, 1e-2) if is_mixture(run.inner) else 0.0, NEAR.get(run.dtype, NEAR_IN_HALF)


def _finding(run: Run, bound: float, near: float) -> Finding:
    worst = max(run.moved, key=lambda at: run.moved[at][0])
    change, by = run.moved[worst]
    if change > bound and by is not None:
        source = named(run, by) if run.spans[by].real else "padding"
        what = f"the outputs of {named(run, worst)} depend on {source}{_OTHER[run.word]}"
        return _located(run, worst, run.exchanged_call(by), bound, what)
    crossing = next((at for at, gradient in run.gradients.items() if gradient != 0), None)
    if crossing is not None:
        path = run.tree.path(crossing)
        other = next((one for one, span in enumerate(run.spans) if span.real and one not in path), crossing)
        what = f"the outputs of {named(run, crossing)} send gradients into another {run.word}{_OTHER[run.word]}"
        return _located(run, crossing, run.exchanged_call(other), 0.0, what)
    what, at = unshared(run, bound)
    if what:
        return _located(run, at, run.alone_call(at), near, what)
    far = {at: distance for at, distance in run.distances.items() if distance is not None and not distance <= near}
    if far:
        at = max(far, key=lambda one: far[one])
        what = f"{named(run, at)} is not computed as when {_ALONE[run.word]} alone (off by {far[at]:.1e})"
        return _located(run, at, run.alone_call(at), near, what)
    return Finding(_crossing_labels(run))


def _located(run: Run, at: int, call: Call, bound: float, what: str) -> Finding:
    """The first module in which a document is computed differently in ``call`` than in the batch.

    Args:
        call: the batch with other tokens, or the document alone: a segment at the end of its path.
        bound: the largest difference that counts as the same.
        what: the finding in words.
    """
    span, shape = run.spans[at], tuple(run.batch["input_ids"].shape)
    split = run.model if isinstance(run.model, WholeRows) else None
    here = locate.Watch(run.inner, shape, span.row, span.start, span.stop, split)
    if call["input_ids"].shape == shape:
        there = locate.Watch(run.inner, shape, span.row, span.start, span.stop, split)
    else:
        stop = call["input_ids"].shape[1]
        there = locate.Watch(run.inner, (1, stop), 0, stop - span.length, stop, split)
    with torch.no_grad():
        for watch, given in ((here, run.batch), (there, call)):
            with watch.watching():
                outputs(run.model, given)
    name = locate.first_difference(here, there, bound)
    if name is None:
        hidden = "torch.compile hides them, and values do not show what hands on gradients alone"
        return Finding(f"{what}; in which module could not be seen ({hidden})")
    cls = type(run.inner.get_submodule(name)).__name__
    meaning = locate.meaning(run.inner, name, status(run.inner) is not None, tree=run.word == "segment")
    return Finding(f"{what}. First in {name or 'the model itself'} ({cls}): {meaning}", name, cls)


def _crossing_labels(run: Run) -> str:
    """The finding if the first label of a span has a part in the loss; empty if none has, or without labels."""
    if run.labels is None:
        return ""
    masked, crossing = run.labels.clone(), []
    for at, span in enumerate(run.spans):
        if span.real and span.start > 0 and int(masked[span.row, span.start]) != IGNORED_LABEL:
            masked[span.row, span.start] = IGNORED_LABEL
            crossing.append(run.number(at))
    if not crossing:
        return ""
    with torch.no_grad():
        given = [run.model(**run.batch, labels=labels) for labels in (run.labels, masked)]
    losses = {float(output.loss) for output in given if getattr(output, "loss", None) is not None}
    if len(losses) < 2:
        return ""
    return (
        f"labels: the last token of {run.word} {crossing[0] - 1} predicts the first of {run.word} {crossing[0]}. Set "
        f"the first label of every {run.word} to -100, as DataCollatorWithFlattening does"
    )


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
