"""Bindings of one attribute are made and released in every order, also around other code's patches."""

import gc
import inspect
import itertools
import json
import os
import subprocess
import sys
import threading
import types
from unittest import mock

import pytest
import wrapt
from fake_models import modeling_function, modeling_interface, modeling_method

from fa2patch import binding
from fa2patch.binding import ABSENT, bind, changing, release, used_by
from fa2patch.upstream import forward, masks, positions
from fa2patch.upstream.seams import formula, interface


class User:
    # Bindings hold their users weakly.
    pass


class Owner:
    def method(self):
        return "stock"

    @staticmethod
    def static():
        return "stock"


class Heir(Owner):
    pass


def ours(original):
    def replacement(*args):
        return f"ours({original(*args)})"

    return replacement


def ours_where_absent(original):
    assert original is ABSENT
    return lambda *args: "ours"


@pytest.fixture
def owner():
    # Each test has a class of its own, with a method and a static method.
    return type("Owner", (), dict(vars(Owner)))


@pytest.fixture
def user():
    user = User()
    yield user
    release(user)


def as_found(owner):
    # Items are compared by identity, because they are functions and descriptors.
    return [(name, id(value)) for name, value in vars(owner).items()]


def module_with(**content):
    module = types.ModuleType("module_of_the_test")
    vars(module).update(content)
    return module


def instance_with(**content):
    instance = Owner()
    vars(instance).update(content)
    return instance


PLACES = {
    "class": (lambda: type("Own", (), {"first": 1, "f": lambda *_: "stock", "last": 2}), ours),
    "class, static": (lambda: type("Own", (), {"f": staticmethod(lambda: "stock"), "last": 2}), ours),
    "class, absent": (lambda: type("Own", (), {"first": 1}), ours_where_absent),
    "class, inherited": (lambda: type("Own", (type("Base", (), {"f": lambda *_: "stock"}),), {}), ours_where_absent),
    "module": (lambda: module_with(first=1, f=lambda: "stock", last=2), ours),
    "module, absent": (lambda: module_with(first=1), ours_where_absent),
    "instance": (lambda: instance_with(first=1, f=lambda: "stock", last=2), ours),
    "instance, absent": (lambda: instance_with(first=1), ours_where_absent),
}


@pytest.mark.parametrize("place", PLACES)
def test_release_leaves_the_namespace_as_found_wherever_the_attribute_is(place, user):
    make_owner, make = PLACES[place]
    owner = make_owner()
    held = dict(vars(owner))
    found = as_found(owner)
    bound = bind(owner, "f", make, user)
    callable_on = owner() if isinstance(owner, type) else owner
    assert callable_on.f() == ("ours" if make is ours_where_absent else "ours(stock)")
    assert (bound.owner, bound.attribute, bound.state) == (owner, "f", "applied")
    assert bound.original is held.get("f", ABSENT)
    release(user)
    assert as_found(owner) == found and used_by(user) == []


def test_a_static_method_stays_static(owner, user):
    bound = bind(owner, "static", ours, user)
    assert isinstance(vars(owner)["static"], staticmethod) and isinstance(bound.original, staticmethod)
    assert owner.static() == owner().static() == "ours(stock)"


def test_what_is_made_is_what_is_installed(owner, user):
    made = []
    bound = bind(owner, "method", lambda original: made.append(ours(original)) or made[-1], user)
    assert type(vars(owner)["method"]) is types.FunctionType
    assert vars(owner)["method"] is bound.replacement is made[0] and len(made) == 1


def test_a_binding_goes_with_the_last_of_its_users(owner):
    found, users = as_found(owner), [User(), User()]
    bindings = [bind(owner, "method", ours, user) for user in (*users, users[0])]
    assert bindings[0] is bindings[1] is bindings[2] and owner().method() == "ours(stock)"
    release(users[0])
    assert used_by(users[0]) == [] and used_by(users[1]) == bindings[:1] and owner().method() == "ours(stock)"
    release(users[0])
    assert owner().method() == "ours(stock)"
    release(users[1])
    assert as_found(owner) == found


@pytest.mark.parametrize("forgotten", [[0], [1], [0, 1]], ids=["first", "second", "both"])
def test_users_are_held_weakly(owner, forgotten):
    found, users = as_found(owner), [User(), User()]
    for user in users:
        user.itself = user  # a cycle, like that of a patch and its model
        bind(owner, "method", ours, user)
    del user
    for index in forgotten:
        users[index] = None
    gc.collect()
    assert owner().method() == ("stock" if len(forgotten) == 2 else "ours(stock)")
    for user in filter(None, users):
        release(user)
    assert as_found(owner) == found


def forgotten(owner):
    # Only the collector finds this user.
    user = User()
    user.itself = user
    return bind(owner, "method", ours, user)


def test_a_binding_is_found_again_while_its_last_user_is_collected(owner, user):
    bound = forgotten(owner)
    with changing():
        gc.collect()
        assert bind(owner, "method", ours, user) is bound
    assert owner().method() == "ours(stock)" and used_by(user) == [bound]


def test_what_is_forgotten_inside_a_change_is_undone_at_its_end(owner):
    found = as_found(owner)
    forgotten(owner)
    with changing():
        with changing():
            gc.collect()
        assert owner().method() == "ours(stock)"
    assert as_found(owner) == found


def test_a_finalizer_waits_for_no_other_thread(owner):
    # The finalizer's thread may hold what the other thread waits for.
    found, inside, done = as_found(owner), threading.Event(), threading.Event()
    forgotten(owner)

    def change():
        with changing():
            inside.set()
            done.wait(10)

    other = threading.Thread(target=change)
    other.start()
    assert inside.wait(10)
    gc.collect()
    assert other.is_alive() and owner().method() == "ours(stock)"
    done.set()
    other.join(10)
    assert as_found(owner) == found


def test_what_is_forgotten_until_the_interpreter_ends_says_nothing():
    said = python("""
import atexit, gc, sys
from fa2patch.binding import bind

class Owner: pass
class User: pass

def forgotten(attribute):
    user = User()
    user.itself = user
    bind(Owner, attribute, lambda original: lambda: 1, user)
    return user

kept, also = forgotten("kept"), [forgotten("in_a_cycle")]
forgotten("collected_at_the_end")
atexit.register(gc.collect)
sys.stderr = sys.stdout
""")
    assert said == ""


def test_a_users_bindings_are_listed_in_the_order_in_which_they_were_made(owner, user):
    bindings = [bind(owner, "static", ours, user), bind(owner, "method", ours, user)]
    bind(owner, "method", ours, other := User())
    assert used_by(user) == bindings and used_by(other) == bindings[1:]
    release(other)


def test_a_factory_that_raises_leaves_nothing(owner, user):
    found, bindings = as_found(owner), list(binding._bindings)
    with pytest.raises(ZeroDivisionError):
        bind(owner, "method", lambda original: 1 / 0, user)
    assert as_found(owner) == found and binding._bindings == bindings and used_by(user) == []


class ByHand:
    # Other code's patch puts back the value that it saved.

    def __init__(self, owner):
        saved = self.saved = vars(owner)["method"]

        def theirs(self):
            return f"theirs({saved(self)})"

        owner.method = theirs

    def undo(self, owner):
        owner.method = self.saved


class ByMock:
    def __init__(self, owner):
        saved = vars(owner)["method"]
        self.patcher = mock.patch.object(owner, "method", lambda self: f"theirs({saved(self)})")
        self.patcher.start()

    def undo(self, owner):
        self.patcher.stop()
        self.patcher = None


class ByWrapt:
    def __init__(self, owner):
        self.saved = vars(owner)["method"]
        owner.method = wrapt.FunctionWrapper(self.saved, lambda wrapped, _, args, kwargs: f"theirs({wrapped(*args)})")

    def undo(self, owner):
        owner.method = self.saved


# What the method returns after each step, and the state of our binding where it says something.
STEPS = {
    ("ours", "theirs", "undo theirs", "undo ours"): [
        ("ours(stock)", "applied"), ("theirs(ours(stock))", "covered"), ("ours(stock)", "applied"), ("stock", None),
    ],
    ("ours", "theirs", "undo ours", "undo theirs"): [
        ("ours(stock)", "applied"), ("theirs(ours(stock))", "covered"), ("theirs(ours(stock))", "covered"),
        ("stock", None),
    ],
    ("theirs", "ours", "undo ours", "undo theirs"): [
        ("theirs(stock)", None), ("ours(theirs(stock))", "applied"), ("theirs(stock)", None), ("stock", None),
    ],
    ("theirs", "ours", "undo theirs", "undo ours"): [
        ("theirs(stock)", None), ("ours(theirs(stock))", "applied"), ("stock", "covered"), ("stock", None),
    ],
}  # fmt: skip

ORDERS = tuple(STEPS)


@pytest.mark.parametrize("somebody", [ByHand, ByMock, ByWrapt])
class TestSomebodyElse:
    @pytest.mark.parametrize("order", ORDERS, ids=" - ".join)
    def test_in_every_order(self, somebody, order, owner, user):
        spaces, bound, theirs = [as_found(owner)], None, None
        for at, (step, (says, state)) in enumerate(zip(order, STEPS[order])):
            if step == "ours":
                bound = bind(owner, "method", ours, user)
            elif step == "theirs":
                theirs = somebody(owner)
            elif step == "undo ours":
                release(user)
                assert used_by(user) == []
            else:
                theirs.undo(owner)
                theirs = None
                gc.collect()
            assert owner().method() == says and state in (None, bound and bound.state), step
            if step == f"undo {order[at - 1]}":
                assert as_found(owner) == spaces[at - 1]
            spaces.append(as_found(owner))
        gc.collect()
        assert as_found(owner) == spaces[0]

    @pytest.mark.parametrize("order", list(itertools.permutations(["first", "theirs", "second"])), ids="-".join)
    def test_bound_again_while_covered(self, somebody, owner, order):
        found = as_found(owner)
        undo = {"first": User(), "second": User(), "theirs": None}
        first = bind(owner, "method", ours, undo["first"])
        undo["theirs"] = somebody(owner)
        second = bind(owner, "method", ours, undo["second"])
        assert first is not second and owner().method() == "ours(theirs(ours(stock)))"
        assert (first.state, second.state) == ("covered", "applied")
        del first, second
        for name in order:
            undone = undo.pop(name)
            undone.undo(owner) if name == "theirs" else release(undone)
            del undone
        gc.collect()
        assert as_found(owner) == found


def test_where_their_replacement_lives_on_ours_beneath_it_is_taken_out_by_the_next_release(owner, user):
    found = as_found(owner)
    bind(owner, "method", ours, user)
    theirs = ByHand(owner)
    lives_on = owner.method
    release(user)
    theirs.undo(owner)
    assert lives_on(owner()) == "theirs(ours(stock))"
    release(user)
    assert as_found(owner) == found


FACTORIES = {
    "causal_lm": (forward.entered, modeling_interface.FakeInterfaceForCausalLM.forward),
    "base_model": (forward.entered, modeling_method.FakeMethodModel.forward),
    "mask": (masks.let_through, modeling_interface.create_causal_mask),
    "eager": (interface.routed, modeling_interface.eager_attention_forward),
    "layer": (formula.ByFormula(modeling_function.FakeSdpaAttention), modeling_function.FakeSdpaAttention.forward),
    "rotary": (positions.rotated_by_document, modeling_method.FakeRotary.forward),
}


@pytest.mark.parametrize("kind", FACTORIES)
def test_a_seams_replacement_is_a_plain_function_with_the_signature_and_name_of_what_it_replaces(kind):
    make, original = FACTORIES[kind]
    made = make(original)
    assert type(made) is types.FunctionType
    assert inspect.signature(made) == inspect.signature(original)
    assert (made.__name__, made.__module__, made.__doc__) == (original.__name__, original.__module__, original.__doc__)


def python(script):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_fa2patch_imports_neither_transformers_nor_flash_attn():
    python("""
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        assert name.partition(".")[0] not in ("transformers", "flash_attn"), f"{name} was imported"

sys.meta_path.insert(0, Refuse())
import fa2patch
assert not {"transformers", "flash_attn"} & {name.partition(".")[0] for name in sys.modules}
""")


ORDERS_ON_LLAMA = """
import functools, gc, importlib, json, os, sys

for name in {imports}:
    importlib.import_module(name)
import torch
import fa2patch
from compat_matrix import tiny_models
from compat_matrix.check.rows import alone, documents, pack
from compat_matrix.check.compare import assert_close

model, docs = tiny_models.build("llama", "sdpa"), documents(5, 9, 1)
modeling = sys.modules[type(model).__module__]
owners = [modeling, *(value for value in vars(modeling).values() if isinstance(value, type))]
owners += [*model.modules(), model.config]


def found():
    return [(str(owner)[:80], name, id(value)) for owner in owners for name, value in vars(owner).items()]


def leaks():
    expected = alone(model, docs)
    found = model(**pack(docs)).logits[0]
    return bool((found - expected).abs().max() > 1e-3 * expected.abs().max())


class Theirs:
    def __init__(self, owner):
        saved = self.saved = owner.forward
        owner.forward = functools.wraps(saved)(lambda self, *args, **kwargs: saved(self, *args, **kwargs))


def run(order):
    applied, steps, theirs = set(), [], []
    for step in order:
        if step == "ours":
            fa2patch.apply(model)
        elif step == "undo ours":
            fa2patch.revert(model)
        elif step == "theirs":
            theirs = [(owner, Theirs(owner)) for owner in (type(model), type(model.model))]
        else:
            for owner, patch in theirs:
                owner.forward = patch.saved
            theirs = owner = patch = None
        steps.append((step, leaks()))
    gc.collect()
    return steps


held, before = [dict(vars(owner)) for owner in owners], found()
for order in {orders}:
    if hasattr(os, "fork"):  # each order in a process in which nothing was ever patched
        sys.stdout.flush()
        if os.fork():
            os.wait()
            continue
    steps = run(order)
    print(json.dumps([order, steps, sorted(set(before) ^ set(found())), before == found()]))
    if hasattr(os, "fork"):
        sys.stdout.flush()
        os._exit(0)
"""


@pytest.fixture(scope="module")
def on_llama():
    # Every order runs in a fresh process, with the given order of imports.
    reports = {}

    def report(imports):
        if imports not in reports:
            lines = python(ORDERS_ON_LLAMA.replace("{imports}", repr(imports)).replace("{orders}", repr(ORDERS)))
            reports[imports] = {tuple(order): rest for order, *rest in map(json.loads, lines.splitlines())}
        return reports[imports]

    return report


@pytest.mark.slow
@pytest.mark.parametrize("imports", [("fa2patch", "transformers"), ("transformers", "fa2patch")], ids="-".join)
@pytest.mark.parametrize("order", ORDERS, ids=" - ".join)
def test_in_a_fresh_process_a_real_models_namespaces_are_as_found(on_llama, imports, order):
    steps, differences, same = on_llama(imports)[order]
    assert differences == [] and same
    ours = {"ours": False, "undo ours": True}
    for step, leaks in steps:
        if step in ours:
            assert leaks is ours[step], step
    if order == ("theirs", "ours", "undo theirs", "undo ours"):
        assert dict(steps)["undo theirs"] is False  # that took ours off; the next batch finds it, and binds again
