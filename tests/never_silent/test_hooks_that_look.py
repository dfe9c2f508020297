"""What only looks is called as often as without fa2patch, with the same tensors; what changes something is proven."""

from __future__ import annotations

import copy
import functools
import pickle
from collections import Counter

import pytest
import torch
from small_models import DOCS, alone, assert_right, called, labelled, llama, patched, refusal, told
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from unknown_modules import Around, harmless, mixed, wrapped_mlp

import fa2patch
from fa2patch import errors
from fa2patch.comparison import tensors
from fa2patch.proof import proving
from fa2patch.proof.looking import WatchedHook, watched

BATCHES = 9


class Seen(list):
    # Each element is one call: of which module, and the tensors that the hook was given.

    def looks(self, module, *given):
        self.append((type(module).__name__, [each.detach().clone() for each in tensors(given)]))

    def count(self):
        return len(self)


def mlp(model):
    return model.model.layers[0].mlp


def on_gradients_of(model, seen):
    # Activation capture that keeps gradients has a hook of a tensor, in each forward.

    def hook(module, given, output):
        output.register_hook(lambda gradient: seen.looks(module, gradient))

    return mlp(model).register_forward_hook(hook)


def as_wandb_does(model, seen):
    # wandb makes histograms of parameters after a forward, and of their gradients when they come.
    for parameter in mlp(model).parameters():
        parameter.register_hook(lambda gradient: seen.looks(None, gradient.float().histc(8)))
    return model.register_forward_hook(lambda module, given, output: seen.looks(module, *mlp(model).parameters()))


def as_profilers_do(model, seen):
    # Profilers count on the modules themselves. The numbers are added up from outside.

    def hook(module, given, output):
        module.__flops__ = getattr(module, "__flops__", 0) + output.numel()
        module.calls = getattr(module, "calls", 0) + 1
        seen.looks(module, torch.tensor([module.calls, module.__flops__]))

    return mlp(model).register_forward_hook(hook)


class Capture:
    # Users write it so: an object holds the model and what was captured.

    def __init__(self, model, seen):
        self.model, self.seen, self.last = model, seen, {}

    def hook(self, name, module, given, output):
        self.last[name] = output
        module.captured = output.detach()
        self.seen.looks(module, output)


def capture(model, seen):
    return mlp(model).register_forward_hook(functools.partial(Capture(model, seen).hook, "mlp"))


HOOKS = {
    "a forward hook": lambda model, seen: mlp(model).register_forward_hook(seen.looks),
    "with keywords": lambda model, seen: model.model.layers[0].self_attn.register_forward_hook(
        lambda module, given, named, output: seen.looks(module, given, named["hidden_states"], output), with_kwargs=True
    ),
    "called always": lambda model, seen: mlp(model).register_forward_hook(seen.looks, always_call=True),
    "a pre-hook": lambda model, seen: mlp(model).register_forward_pre_hook(seen.looks),
    "of the head": lambda model, seen: model.lm_head.register_forward_hook(seen.looks),
    "of the embedding": lambda model, seen: model.get_input_embeddings().register_forward_hook(seen.looks),
    "of the base model": lambda model, seen: model.model.register_forward_hook(seen.looks),
    "of the model": lambda model, seen: model.register_forward_hook(seen.looks),
    "a pre-hook of the model": lambda model, seen: model.register_forward_pre_hook(
        lambda module, given, named: seen.looks(module, named["input_ids"]), with_kwargs=True
    ),
    "of gradients": lambda model, seen: mlp(model).register_full_backward_hook(seen.looks),
    "before gradients": lambda model, seen: mlp(model).register_full_backward_pre_hook(seen.looks),
    "of gradients, as once": lambda model, seen: mlp(model).act_fn.register_backward_hook(seen.looks),
    "of a tensor": on_gradients_of,
    "of all modules": lambda model, seen: register_module_forward_hook(seen.looks),
    "before all modules": lambda model, seen: register_module_forward_pre_hook(seen.looks),
    "of the gradients of all modules": lambda model, seen: register_module_full_backward_hook(seen.looks),
    "as wandb": as_wandb_does,
    "as a profiler": as_profilers_do,
    "an object that holds the model": capture,
}

STEPS = {
    "before apply": ("hook", "apply", "run", "run"),
    "after apply": ("apply", "hook", "run", "run"),
    "after a packed batch": ("apply", "run", "hook", "run"),
    "for one batch each": ("apply", "hook", "run", "remove", "run", "hook", "run", "remove", "hook", "run"),
}


def recorded(hook, steps, change=lambda model: None, **options):
    """What a hook has seen in a training whose model was patched with these options."""
    model, seen, handle = llama().train(), Seen(), None
    change(model)
    try:
        for step in steps:
            if step == "apply":
                fa2patch.apply(model, **options)
            elif step == "hook":
                handle = hook(model, seen)
            elif step == "remove":
                handle.remove()
            else:
                for _ in range(BATCHES if steps[-1] == step and len(steps) == 4 else 1):
                    torch.manual_seed(3)
                    model.zero_grad()
                    model(**labelled()).loss.backward()
    finally:
        handle.remove()
    return seen


def assert_the_same(found, expected):
    assert found.count() == expected.count() > 0
    for (name, ones), (other, others) in zip(found, expected):
        assert name == other and len(ones) == len(others)
        assert all(torch.equal(one, two) for one, two in zip(ones, others)), name


UNKNOWN = {"nothing else": lambda model: None, "and an unknown module": lambda model: wrapped_mlp(model, harmless)}


@pytest.mark.parametrize("change", UNKNOWN.values(), ids=UNKNOWN)
@pytest.mark.parametrize("when", STEPS)
@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_a_hook_that_looks_sees_each_forward_once(hook, when, change):
    expected = recorded(hook, STEPS[when], change, prove=False)
    assert_the_same(recorded(hook, STEPS[when], change), expected)


def test_a_model_whose_hooks_look_is_not_proven(monkeypatch):
    monkeypatch.setattr(proving, "prove", lambda *given, **named: pytest.fail("proven"))
    recorded(HOOKS["a forward hook"], STEPS["before apply"])


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen[str(function)] += 1
        return function(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen[str(function)] += 1
        return function(*args, **(kwargs or {}))


def counted(mode, hook, **options):
    # What a mode counts in a forward and backward, in the first packed batch.
    model = llama().train()
    wrapped_mlp(model, harmless)
    if hook:
        mlp(model).register_forward_hook(Seen().looks)
    patched(model, **options)
    with mode() as counter:
        model(**labelled()).loss.backward()
    return counter.seen if hasattr(counter, "seen") else counter.get_flop_counts()


def flop_counter():
    return pytest.importorskip("torch.utils.flop_counter").FlopCounterMode(display=False)


@pytest.mark.parametrize("hook", [False, True], ids=["no hook", "and a hook"])
@pytest.mark.parametrize("mode", [Operators, Functions, flop_counter])
def test_a_mode_that_counts_does_not_see_a_proof(mode, hook):
    expected = counted(mode, hook, prove=False)
    found = counted(mode, hook)
    if mode is Functions:  # what a patched forward asks of its arguments may be asked once more
        assert all(found[each] == expected[each] for each in expected if "linear" in each or "embedding" in each)
    else:
        assert found == expected


# What changes something


def in_place(change):
    def hook(module, given, output):
        change(output)

    return lambda model: mlp(model).register_forward_hook(hook)


def by_numpy(output):
    values = output.detach().numpy()
    values -= values.mean(1, keepdims=True)


def by_data(output):
    output.data = mixed(output.data)


def keywords(model):
    def hook(module, given, named):
        named["hidden_states"] = mixed(named["hidden_states"])

    model.model.layers[0].self_attn.register_forward_pre_hook(hook, with_kwargs=True)


def an_output(model):
    def hook(module, given, output):
        output["logits"] = mixed(output.logits)

    model.register_forward_hook(hook)


def an_attribute(model):
    norm = model.model.norm

    def hook(module, given):
        module.variance_epsilon = float(given[0].detach().mean(1).square().mean())

    norm.register_forward_pre_hook(hook)


def another_parameter(model):
    def hook(module, given):
        module.weight.data = module.weight.data * given[0].detach().mean()

    model.model.norm.register_forward_pre_hook(hook)


def from_the_third_call(model):
    calls = []

    def hook(module, given, output):
        calls.append(1)
        return mixed(output) if len(calls) > 2 else None

    mlp(model).register_forward_hook(hook)


def two_hooks(model):
    # The first one only looks, and the second one returns what it has seen.
    seen = {}
    mlp(model).register_forward_hook(lambda module, given, output: seen.update(output=output))
    model.model.layers[1].mlp.register_forward_hook(
        lambda module, given, output: output + seen["output"].mean(1, keepdim=True)
    )


def a_module_that_reads(model):
    # A hook only looks, and a module of the user's own uses what it has seen, as heads over several layers do.
    seen = {}
    mlp(model).register_forward_hook(lambda module, given, output: seen.update(output=output))
    model.model.norm = Around(model.model.norm, lambda self, states: self.inner(states + 8 * mixed(seen["output"])))


STASH = {}


def _keeps(module, given, output):
    STASH["output"] = output


def _reads(self, states):
    return self.inner(states + 8 * mixed(STASH["output"]) if STASH else states)


def a_module_that_reads_a_global_name(model):
    STASH.clear()
    mlp(model).register_forward_hook(_keeps)
    model.model.norm = Around(model.model.norm, _reads)


def a_module_that_reads_an_attribute(model):
    def hook(module, given, output):
        module.captured = output

    mlp(model).register_forward_hook(hook)
    model.model.norm = Around(
        model.model.norm,
        lambda self, states: self.inner(states + 8 * mixed(getattr(self.of, "captured", torch.zeros(1, 1, 1)))),
    )
    vars(model.model.norm)["of"] = mlp(model)


CHANGES = {
    "in place": in_place(lambda output: output.sub_(output.mean(1, keepdim=True))),
    "in place, past the version": in_place(lambda output: output.data.sub_(output.data.mean(1, keepdim=True))),
    "as an array": in_place(by_numpy),
    "other data": in_place(by_data),
    "keywords": keywords,
    "an output": an_output,
    "an attribute that is read": an_attribute,
    "a parameter": another_parameter,
    "from the third call on": from_the_third_call,
    "two hooks": two_hooks,
    "a module that reads": a_module_that_reads,
    "a module that reads a global name": a_module_that_reads_a_global_name,
    "a module that reads an attribute": a_module_that_reads_an_attribute,
}


@pytest.mark.parametrize("after", [False, True], ids=["before apply", "after a packed batch"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_hook_that_changes_something_is_refused_before_the_numbers_are_used(change, after):
    model = llama()
    if after:
        patched(model)
    else:
        change(model)
        fa2patch.apply(model)
    with torch.no_grad():
        if after:
            model(**told())
            change(model)
        calls = 2 if change is from_the_third_call else 0
        for _ in range(calls):
            assert torch.isfinite(model(**told()).logits).all()
        for _ in range(2):
            with refusal(error=errors.PackingNotIsolated):
                model(**told())


def gradient_of_a_tensor(change):
    def hook(module, given, output):
        if output.requires_grad:
            output.register_hook(change)

    return lambda model: mlp(model).register_forward_hook(hook)


def gradient_of_a_node(model):
    def hook(module, given, output):
        if output.grad_fn is not None:
            output.grad_fn.register_prehook(lambda gradients: (mixed(gradients[0]),))

    mlp(model).register_forward_hook(hook)


GRADIENTS = {
    "of a tensor": gradient_of_a_tensor(mixed),
    "of a module": lambda model: mlp(model).register_full_backward_hook(lambda m, into, out: (mixed(into[0]),)),
    "before a module": lambda model: mlp(model).register_full_backward_pre_hook(lambda m, out: (mixed(out[0]),)),
}


@pytest.mark.parametrize("mix", GRADIENTS.values(), ids=GRADIENTS)
def test_a_hook_that_mixes_gradients_is_refused_in_the_backward(mix):
    model = patched(llama().train(), mix)
    loss = model(**labelled()).loss
    with refusal("gradient", errors.PackingNotIsolated):
        loss.backward()
    with refusal("gradient", errors.PackingNotIsolated):
        model(**labelled())


SCALES = {
    "of a tensor": gradient_of_a_tensor(lambda gradient: 2 * gradient),
    "of a module": lambda model: mlp(model).register_full_backward_hook(lambda m, into, out: (2 * into[0],)),
    "in place": in_place(lambda output: output.mul_(2)),
}


def test_a_hook_of_a_gradients_function_is_refused_in_the_forward():
    model = patched(llama().train(), gradient_of_a_node)
    with refusal("gradient", errors.PackingNotIsolated):
        model(**labelled())


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_a_hook_that_scales_is_proven_and_computed(scale):
    model, plain = patched(llama().train(), scale), llama().train()
    scale(plain)
    for _ in range(3):
        assert_right(called(model, labelled()), alone(plain))


def test_a_hook_that_changes_dense_batches_alone_leaves_them_as_they_are():
    model, plain = llama(), llama()
    dense = {"input_ids": torch.cat(DOCS)[None]}

    def hook(module, given, output):
        return mixed(output) if module.dense else None

    for each in (model, plain):
        mlp(each).dense = False
        mlp(each).register_forward_hook(hook)
    fa2patch.apply(model)
    with torch.no_grad():
        model(**told())
        mlp(model).dense = mlp(plain).dense = True
        assert torch.equal(model(**dense).logits, plain(**dense).logits)
        mlp(model).dense = False
        model(**told())
        mlp(model).dense = True
        assert torch.equal(model(**dense).logits, plain(**dense).logits)


# A model's own state


class Keeps(torch.nn.Module):
    # It counts its calls in every way, and looks at one token at a time.

    seen_by_all = 0

    def __init__(self, inner):
        super().__init__()
        self.inner, self.calls, self.seen, self.by_name = inner, 0, [], Counter()
        self.register_buffer("mean", torch.zeros(()))
        self.total = torch.zeros(())
        self.generator = torch.Generator().manual_seed(4)
        self.helper = Helper()
        count = 0

        def counts():
            nonlocal count
            count += 1
            return count

        self.counts = counts

    def forward(self, states):
        self.calls += 1
        self.seen.append(tuple(states.shape))
        self.by_name["calls"] += 1
        self.helper.calls += 1
        Keeps.seen_by_all += 1
        with torch.no_grad():
            self.mean.add_(1.0)
            self.total += 1.0
        torch.rand(1, generator=self.generator)
        self.counted = self.counts()
        return self.inner(states)

    def kept(self):
        values = (self.calls, list(self.seen), dict(self.by_name), float(self.mean), float(self.total), self.counted)
        return (*values, self.helper.calls, Keeps.seen_by_all, self.generator.get_state().tolist())


class Helper:
    def __init__(self):
        self.calls = 0


@pytest.mark.parametrize("hook", [None, "looks", "scales"])
def test_a_proof_leaves_what_modules_keep_as_it_was(hook):
    found = []
    for prove in (False, "unknown"):
        model = llama().train()
        model.model.layers[1].mlp = Keeps(model.model.layers[1].mlp)
        if hook is not None:
            mlp(model).register_forward_hook(
                lambda module, given, output, hook=hook: 2 * output if hook == "scales" else None
            )
        fa2patch.apply(model, prove=prove)
        Keeps.seen_by_all = 0
        for _ in range(4):
            model(**labelled()).loss.backward()
        found.append(model.model.layers[1].mlp.kept())
    assert found[0] == found[1]


def test_a_proof_leaves_pythons_and_numpys_random_numbers_as_they_were():
    import random

    import numpy

    found = []
    for prove in (False, True):
        model = patched(prove=prove)
        model.model.layers[1].mlp = Around(
            model.model.layers[1].mlp,
            lambda self, states: (random.random(), numpy.random.rand(), self.inner(states))[2],
        )
        random.seed(5)
        numpy.random.seed(5)
        torch.manual_seed(5)
        model(**told())
        found.append((random.random(), float(numpy.random.rand()), float(torch.rand(1))))
    assert found[0] == found[1]


# The patch


def test_revert_puts_hooks_back():
    model, seen = llama(), Seen()
    hook, of_all = seen.looks, lambda module, given, output: None
    mlp(model).register_forward_hook(hook)
    handle = register_module_forward_hook(of_all)
    try:
        with fa2patch.apply(model):
            model(**told())
            assert len(watched(model)) == 2
        assert not watched(model)
        assert hook in mlp(model)._forward_hooks.values()
        assert of_all in torch.nn.modules.module._global_forward_hooks.values()
    finally:
        handle.remove()


def looks(module, given, output):
    # A pickle needs a function of the module.
    ...


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_keep_their_hooks(copied):
    model = llama()
    mlp(model).register_forward_hook(looks)
    fa2patch.apply(model)
    other = copied(model)
    other(**told())
    assert [hook.function for hook in watched(other)] == [looks]
    fa2patch.revert(other)
    assert [*mlp(other)._forward_hooks.values()] == [looks]


def test_without_proofs_no_hook_is_watched():
    model = llama()
    mlp(model).register_forward_hook(looks)
    fa2patch.apply(model)
    assert len(watched(model)) == 1
    fa2patch.apply(model, prove=False)
    assert not any(isinstance(hook, WatchedHook) for hook in mlp(model)._forward_hooks.values())


@pytest.mark.parametrize("mixes", [False, True])
def test_a_compiled_model_calls_a_hook_once_to_see_what_it_does(mixes):
    torch._dynamo.reset()
    model, calls = llama(), []

    def hook(module, given, output):
        if not torch.compiler.is_compiling():
            calls.append(1)
        return mixed(output) if mixes else None

    mlp(model).register_forward_hook(hook)
    fa2patch.apply(model)
    run = torch.compile(model, backend="eager")
    with torch.no_grad():
        if mixes:
            with refusal(error=errors.PackingNotIsolated):
                run(**told())
        else:
            assert torch.isfinite(run(**told()).logits).all()
            assert len(calls) <= 1
