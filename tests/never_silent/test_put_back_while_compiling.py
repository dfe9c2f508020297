"""A patch that begins or ends while a graph is being compiled, of which the compilation does not notice anything."""

from __future__ import annotations

import contextlib
import gc
import threading
import time

import pytest
import torch
import torch._dynamo
from small_models import DOCS, class_of, llama

import fa2patch
from fa2patch import _torch
from fa2patch.binding import bind, release


class Owner(torch.nn.Module):
    def forward(self, x):
        return x + 1


class User:
    # Bindings hold their users weakly.
    pass


STOCK = vars(Owner)["forward"]


def ours(original):
    def forward(self, x):
        return original(self, x)

    return forward


def is_back(owner=Owner, original=STOCK, seconds=5):
    # Another thread may put it back soon.
    end = time.monotonic() + seconds
    while vars(owner)["forward"] is not original and time.monotonic() < end:
        time.sleep(0.01)
    return vars(owner)["forward"] is original


@pytest.fixture
def users():
    # The user of a binding is in a list, so that the test can drop it.
    torch._dynamo.reset()
    held = [User()]
    bind(Owner, "forward", ours, held[0])
    yield held
    for user in held:
        release(user)
    assert is_back()


def released(users):
    release(users[0])


def collected(users):
    while users:
        user = users.pop()
        user.itself = user
        del user
    gc.collect()


@pytest.mark.parametrize("ends", [released, collected])
def test_what_this_thread_compiles(users, ends):
    seen = []

    def backend(graph, inputs):
        ends(users)
        seen.append(vars(Owner)["forward"])
        return graph

    module = Owner()
    compiled = torch.compile(lambda x: module(x) * 2, backend=backend)
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 4.0))
    assert seen[0] is not STOCK and is_back()
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 4.0))


@contextlib.contextmanager
def compiled_meanwhile(function, *args, **kwargs):
    # Another thread compiles the function and waits in the middle of that. The list holds what it returns at the end.
    inside, done, found = threading.Event(), threading.Event(), []

    def backend(graph, inputs):
        inside.set()
        done.wait(10)
        return graph

    def compile_it():
        found.append(torch.compile(function, backend=backend)(*args, **kwargs))

    thread = threading.Thread(target=compile_it)
    thread.start()
    assert inside.wait(60)
    try:
        yield found
    finally:
        done.set()
        thread.join(60)


@pytest.mark.parametrize("ends", [released, collected])
def test_what_another_thread_compiles(users, ends):
    module = Owner()
    with compiled_meanwhile(lambda x: module(x) * 2, torch.ones(2)) as found:
        ends(users)
        assert vars(Owner)["forward"] is not STOCK
    assert torch.equal(found[0], torch.full((2,), 4.0)) and is_back()


def test_a_first_model_is_patched_while_another_thread_compiles_an_unpatched_one():
    # ``apply`` waits for that: the guards of the graph would fail, as what was traced would be another function.
    torch._dynamo.reset()
    model, plain, ids = llama(), llama(), torch.cat(DOCS)[None]
    expected = plain(input_ids=ids).logits
    applying = threading.Thread(target=fa2patch.apply, args=(model,))
    with compiled_meanwhile(plain, input_ids=ids) as found:
        applying.start()
        applying.join(0.5)
    applying.join(60)
    assert torch.equal(found[0].logits, expected)
    assert fa2patch.status(model) is not None and fa2patch.status(plain) is None


def test_without_a_compilation_they_are_back_at_once(users):
    released(users)
    assert vars(Owner)["forward"] is STOCK


def test_dynamo_has_the_lock_that_is_asked_for():
    torch._dynamo.reset()
    assert _torch._lock_of_dynamo() is not None


def test_a_patched_model_is_collected_while_another_one_compiles():
    torch._dynamo.reset()
    garbage, model, plain = [llama()], llama(), llama()
    owner = class_of("LlamaForCausalLM")
    original = owner.forward
    fa2patch.apply(garbage[0])
    assert owner.forward is not original
    garbage[0].itself = garbage[0].__dict__
    ids = torch.cat(DOCS)[None]

    def backend(graph, inputs):
        garbage.clear()
        gc.collect()
        return graph.forward

    with torch.no_grad():
        found = torch.compile(model, backend=backend)(input_ids=ids).logits
        assert torch.equal(found, plain(input_ids=ids).logits)
    assert is_back(owner, original)
