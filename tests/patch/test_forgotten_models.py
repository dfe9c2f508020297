"""Patched models that are forgotten and collected at any moment, in any thread: the other models notice nothing."""

import contextlib
import copy
import functools
import gc
import random
import sys

import pytest
import torch
from packed_rows import built
from threads import in_threads

import fa2patch
from compat_matrix.check.rows import documents, pack
from compat_matrix.tiny_models import is_present
from fa2patch import binding
from fa2patch.binding import used_by, users

BATCH = pack(documents(5, 9, 1, 3))


def computed(model):
    # Returned with the gradient of the embeddings.
    logits = model(**BATCH).logits
    model.zero_grad()
    logits.square().sum().backward()
    return logits.detach(), model.get_input_embeddings().weight.grad.clone()


def replaced(patch):
    return sorted((str(used.owner), used.attribute, used.state) for used in used_by(patch))


def namespaces(owners):
    return [(str(owner), name, id(value)) for owner in owners for name, value in vars(owner).items()]


def by_bindings(frame):
    # The call is one of the registry of bindings, or made there.
    return binding.__file__ in (frame.f_code.co_filename, frame.f_back.f_code.co_filename)


def forget(model):
    # The collector alone can find the model: like most models it is part of a cycle.
    model.itself = model.__dict__


@contextlib.contextmanager
def collected_by_hand():
    # The collector runs when it is called, and sees only what was made since: it takes microseconds.
    gc.collect()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        sys.settrace(None)
        gc.unfreeze()
        gc.enable()
        gc.collect()


class Life:
    # A model is patched, computes and is reverted. A forgotten one is collected at one call of Python's in between.

    def __init__(self, family, other):
        plain = built(family)
        patch = fa2patch.apply(plain)
        self.expected, self.sites = computed(plain), replaced(patch)
        self.owners = list(dict.fromkeys(used.owner for used in used_by(patch)))
        patch.revert()
        self.family, self.other, self.places = family, other, []
        self.found = namespaces(self.owners)
        self.run(None)  # what is looked up or imported once in a process is there

    def run(self, place):
        # ``places`` are the calls, and whether bindings make them. At None, nothing is collected.
        assert namespaces(self.owners) == self.found and not users()
        forgotten, model, self.places = built(self.other), built(self.family), []
        fa2patch.apply(forgotten)
        forget(forgotten)
        del forgotten

        def called(frame, event, argument):
            self.places.append(by_bindings(frame))
            if len(self.places) - 1 == place:
                gc.collect()
                sys.settrace(None)

        def watched():
            sys.settrace(called if place is None or len(self.places) <= place else None)

        watched()
        patch = fa2patch.apply(model)
        logits, gradient = computed(model)
        sys.settrace(None)
        assert replaced(patch) == self.sites
        assert torch.equal(logits, self.expected[0]) and torch.equal(gradient, self.expected[1])
        watched()
        patch.revert()
        sys.settrace(None)
        gc.collect()
        assert namespaces(self.owners) == self.found and not users()


def lived(family, other, chosen):
    life = Life(family, other)
    with collected_by_hand():
        life.run(None)
        places = life.places
        for place in chosen(places):
            life.run(place)
        assert len(places) > 1000


def some(places):
    # Forty of the calls that bindings make, and twenty of all.
    near = [place for place, by_bindings in enumerate(places) if by_bindings]
    return sorted({*near[:: len(near) // 40], *range(0, len(places), len(places) // 20)})


# One for each seam in the releases that have the interface; others have the formula only.
FAMILIES = ("llama", "gpt_neo")


@pytest.mark.parametrize("other", ["the same", "mistral"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_forgotten_model_is_collected_while_another_one_lives(family, other):
    lived(family, family if other == "the same" else other, some)


@pytest.mark.slow
@pytest.mark.parametrize("other", ["the same", "mistral"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_forgotten_model_is_collected_at_every_call(family, other):
    lived(family, family if other == "the same" else other, lambda places: range(len(places)))


def in_four_threads(models):
    # Each model computes, and is then reverted or forgotten, also after a copy of it. The collector runs at random
    # calls of Python's. What a thread does is fixed by its seed, and the order of the threads is the machine's.
    families = [family for family in ("llama", "mistral", "gpt_neo", "qwen2", "falcon", "phi") if is_present(family)]
    plain, expected, found, owners = {family: built(family) for family in families}, {}, [], []
    for family, model in plain.items():
        patch = fa2patch.apply(model)
        expected[family] = model(**BATCH).logits.detach()
        owners += [used.owner for used in used_by(patch)]
        patch.revert()
    before = namespaces(owners)

    def live(seed):
        chosen, kept = random.Random(seed), []

        def called(frame, event, argument):
            if chosen.random() < (0.03 if by_bindings(frame) else 0.0002):
                gc.collect()

        for _ in range(models // 4):
            family = chosen.choice(families)
            model = copy.deepcopy(plain[family])
            sys.settrace(called)
            patch = fa2patch.apply(model)
            logits = model(**BATCH).logits.detach()
            sys.settrace(None)
            found.append(
                torch.equal(logits, expected[family]) and all(each.state == "applied" for each in patch.layers)
            )
            end = chosen.choice(("forget", "forget a copy", "revert", "keep"))
            if end == "revert":
                patch.revert()
            elif end != "keep":
                forget(copy.deepcopy(model) if end == "forget a copy" else model)
            kept[:] = [model] if end == "keep" else []
            del model, patch

    with collected_by_hand():
        in_threads(*(functools.partial(live, seed) for seed in range(4)), times=1)
    assert found == [True] * models
    assert namespaces(owners) == before and not users()


def test_models_live_in_four_threads():
    in_four_threads(80)


@pytest.mark.slow
def test_a_thousand_models_live_in_four_threads():
    in_four_threads(1000)
