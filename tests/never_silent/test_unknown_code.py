"""Code that is neither torch's nor Transformers', wherever it is put: it is found, and what mixes tokens is refused."""

from __future__ import annotations

import copy
import functools
import importlib
import sys
import types
from unittest import mock

import pytest
import torch
import transformers
from small_models import (
    DOCS,
    alone,
    assert_right,
    called,
    labelled,
    llama,
    logits_alone,
    of_family,
    patched,
    refusal,
    told,
)
from threads import in_threads
from unknown_modules import Around, harmless, mixed, mixes_gradients, wrapped_mlp

import fa2patch
from compat_matrix.check.compare import assert_close
from fa2patch import errors
from fa2patch.proof.looking import WatchedHook
from fa2patch.proof.unknown import unknown
from fa2patch.upstream import other_code
from fa2patch.upstream.find_layers import ModelLayers


class MixingActivation:
    # A plain callable in the place of an activation.

    def __call__(self, values):
        return torch.nn.functional.silu(mixed(values))


def refused(call, match=None):
    with refusal(match, errors.PackingNotIsolated):
        call()


def mlp_of(model):
    return model.model.layers[0].mlp


def on_output(module, given, output):
    return mixed(output)


def forward_hook(model):
    mlp_of(model).register_forward_hook(on_output)


def hook_on_a_layer(model):
    def hook(module, given, output):
        states = output[0] if isinstance(output, tuple) else output
        states = states + 0.5 * states.cumsum(1)
        return (states, *output[1:]) if isinstance(output, tuple) else states

    model.model.layers[0].register_forward_hook(hook)


def hook_with_keywords(model):
    mlp_of(model).register_forward_hook(lambda module, given, named, output: mixed(output), with_kwargs=True)


def backward_hook(model):
    mlp_of(model).register_full_backward_hook(lambda module, into, out: (mixed(into[0]),))


def own_forward(model):
    mlp = mlp_of(model)
    mlp.forward = types.MethodType(lambda self, hidden: mixed(type(self).forward(self, hidden)), mlp)


def wrapped_forward(model):
    # ``functools.wraps`` copies the ``__module__`` of Transformers' function.
    mlp = mlp_of(model)
    inner = mlp.forward
    mlp.forward = functools.wraps(inner)(lambda *given, **named: mixed(inner(*given, **named)))


def activation(function):
    def put(model):
        del mlp_of(model).act_fn
        mlp_of(model).act_fn = function

    return put


def behind_the_mlp(make):
    def put(model):
        layer = model.model.layers[0]
        layer.mlp = torch.nn.Sequential(layer.mlp, make((sum(map(len, DOCS)), model.config.hidden_size)))

    return put


def call_of_its_class(model):
    # The forward is the class's, and the call goes around it.
    mlp = mlp_of(model)
    mlp.__class__ = type(
        "Called", (type(mlp),), {"__call__": lambda self, hidden: mixed(super(type(self), self).__call__(hidden))}
    )


class Scripted(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.linear = torch.nn.Linear(size, size)

    def forward(self, hidden):
        output = self.linear(hidden)
        return output - output.mean(1, keepdim=True)


def scripted(model):
    model.model.layers[0].mlp = torch.jit.script(Scripted(model.config.hidden_size))


MIXING = {
    "forward_hook": forward_hook,
    "pre_hook": lambda model: mlp_of(model).register_forward_pre_hook(lambda module, given: (mixed(given[0]),)),
    "hook_on_a_layer": hook_on_a_layer,
    "hook_on_the_embedding": lambda model: model.get_input_embeddings().register_forward_hook(on_output),
    "hook_on_the_last_norm": lambda model: model.model.norm.register_forward_hook(on_output),
    "hook_with_keywords": hook_with_keywords,
    "own_forward": own_forward,
    "wrapped_forward": wrapped_forward,
    "plain_activation": activation(MixingActivation()),
    "function_as_activation": activation(
        functools.partial(lambda scale, values: scale * torch.nn.functional.silu(mixed(values)), 2.0)
    ),
    "pooling_of_torch": behind_the_mlp(lambda size: torch.nn.AvgPool2d((3, 1), 1, (1, 0))),
    "softmax_of_torch": behind_the_mlp(lambda size: torch.nn.Softmax(dim=1)),
    "norm_of_torch": behind_the_mlp(lambda size: torch.nn.LayerNorm(size, elementwise_affine=False)),
    "call_of_its_class": call_of_its_class,
    "scripted": scripted,
}


@pytest.mark.parametrize(
    "after", ["before apply", pytest.param("after apply", marks=pytest.mark.slow), "after a packed batch"]
)
@pytest.mark.parametrize("mix", MIXING.values(), ids=MIXING)
def test_what_mixes_tokens_is_refused(mix, after):
    model = llama()
    if after == "before apply":
        mix(model)
    fa2patch.apply(model)
    if after == "after a packed batch":
        model(**told())
    if after != "before apply":
        mix(model)
    for _ in range(2):
        with refusal(error=errors.PackingNotIsolated):
            model(**told())


def test_a_function_is_found_under_any_name():
    # BERT's activation has a name that comes after ``forward`` in the alphabet.
    model = of_family("bert:masked")
    intermediate = model.bert.encoder.layer[0].intermediate
    vars(intermediate)["_modules"].pop("intermediate_act_fn", None)
    vars(intermediate)["intermediate_act_fn"] = MixingActivation()
    fa2patch.apply(model)
    refused(lambda: model(**told()), "intermediate_act_fn")


@pytest.mark.parametrize("prove", [True, "unknown"])
def test_a_hook_on_gradients_alone_is_refused_in_training(prove):
    model = llama().train()
    backward_hook(model)
    fa2patch.apply(model, prove=prove)
    loss = model(**labelled()).loss  # the hook is watched in the backward that runs anyway
    refused(loss.backward, "gradient")
    refused(lambda: model(**labelled()), "gradient")
    with torch.no_grad():
        model(**told())  # nobody asks for a gradient


@pytest.mark.parametrize("name", ["LlamaMLP", "LlamaRMSNorm"])
def test_a_forward_replaced_on_the_class_is_refused(name, monkeypatch):
    cls = getattr(transformers.models.llama.modeling_llama, name)
    inner = cls.forward
    model = patched()
    model(**told())
    monkeypatch.setattr(cls, "forward", lambda self, *given: mixed(inner(self, *given)))
    refused(lambda: model(**told()))


def of_linear(change):
    # The hook is registered for all modules, and changes what linear ones are given or return.
    return lambda module, given, output=None: change(given, output) if isinstance(module, torch.nn.Linear) else None


OF_ALL_MODULES = {
    "on every forward": ("forward_hook", lambda given, output: mixed(output)),
    "before every forward": ("forward_pre_hook", lambda given, output: (mixed(given[0]),)),
    "on every gradient": ("full_backward_hook", lambda into, out: (mixed(into[0]),)),
}


@pytest.mark.parametrize("after", [False, True], ids=["before apply", "after a packed batch"])
@pytest.mark.parametrize("where", OF_ALL_MODULES)
def test_a_hook_of_all_modules_is_refused(where, after):
    model = llama().train()
    if after:
        patched(model)(**told())
    name, change = OF_ALL_MODULES[where]
    handle = getattr(torch.nn.modules.module, f"register_module_{name}")(of_linear(change))
    try:
        if not after:
            fa2patch.apply(model)
        with pytest.raises(errors.PackingNotIsolated, match="of all modules"):
            model(**labelled()).loss.backward()
    finally:
        handle.remove()
    model(**labelled())


@pytest.mark.parametrize("after", [False, True], ids=["before apply", "after a packed batch"])
def test_a_function_replaced_in_a_modeling_file_is_refused(after, monkeypatch):
    # Other packages put their rotary embedding there.
    modeling = transformers.models.llama.modeling_llama
    inner = modeling.apply_rotary_pos_emb

    def mixing(query, key, *given, **named):
        query, key = inner(query, key, *given, **named)
        return query, key * (1 + key.mean(-2, keepdim=True))

    model = llama()
    if after:
        patched(model)(**told())
    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", mixing)
    if not after:
        fa2patch.apply(model)
    refused(lambda: model(**told()), "apply_rotary_pos_emb")


def test_a_harmless_function_in_a_modeling_file_is_computed(monkeypatch):
    modeling = transformers.models.llama.modeling_llama
    inner = modeling.apply_rotary_pos_emb
    model = llama()
    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", lambda *given, **named: inner(*given, **named))
    expected = alone(model)
    fa2patch.apply(model)
    assert_right(called(model, labelled()), expected)


def double(values):
    return 2 * values


HARMLESS = {
    "nothing unknown": lambda model: None,
    "a module": lambda model: wrapped_mlp(model, harmless),
    "a forward hook": lambda model: model.model.layers[0].mlp.register_forward_hook(lambda m, given, out: double(out)),
    "a hook that only looks": lambda model: model.register_forward_hook(lambda module, given, output: None),
    "a pre-hook": lambda model: model.model.norm.register_forward_pre_hook(lambda module, given: (double(given[0]),)),
    "a function as activation": lambda model: vars(model.model.layers[0].mlp).update(
        act_fn=(model.model.layers[0].mlp._modules.pop("act_fn"), torch.tanh)[1]
    ),
}


PROVE = [("a module", True), ("a module", "unknown"), ("nothing unknown", True)]


@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
@pytest.mark.parametrize(("what", "prove"), [*((what, None) for what in HARMLESS), *PROVE])
def test_what_is_harmless_is_proven_and_computed(what, prove, training):
    model = patched(llama().train(training), HARMLESS[what], prove=prove)
    plain = llama().train(training)
    HARMLESS[what](plain)
    for _ in range(3):
        assert_right(called(model, labelled()), alone(plain))


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert:masked", "mamba2", "mixtral", "falcon", "gemma", "phi3"])
def test_models_as_they_came_need_no_proof(family):
    model = of_family(family)
    found = unknown(ModelLayers(model))
    by_itself = "computes attention by itself"  # BERT up to 4.57
    assert not found or "no evidence" in found or by_itself in found
    with fa2patch.apply(model):
        assert unknown(ModelLayers(model)) == found


@pytest.mark.parametrize(
    "module, is_known",
    [
        ("deepspeed.runtime.engine", True),
        ("deepspeed.runtime.zero.parameter_offload", True),
        ("deepspeed.runtime.data_pipeline.data_routing", False),
        ("deepspeed.moe", False),
    ],
)
def test_hooks_of_deepspeeds_engine_need_no_proof_and_its_layers_do(module, is_known, tmp_path, monkeypatch):
    # Under Ulysses no rank could prove them by itself, and every model that the engine holds has them.
    *packages, name = module.split(".")
    for count in range(1, len(packages) + 1):
        (folder := tmp_path.joinpath(*packages[:count])).mkdir()
        (folder / "__init__.py").touch()
    (folder / f"{name}.py").write_text("def hook(module, given):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(other_code, "_folder", other_code._folder.__wrapped__)  # without its cache
    model, others = llama(), {name: loaded for name, loaded in sys.modules.items() if name.split(".")[0] != "deepspeed"}
    with mock.patch.dict(sys.modules, others, clear=True):
        hook = WatchedHook(importlib.import_module(module).hook)
        hook.changes = True
        model.register_forward_pre_hook(hook if not other_code.is_known(hook.function) else hook.function)
        found = unknown(ModelLayers(model))
    assert not found if is_known else f"{module}.hook" in found


# What the proof must see


def only_in_training(inner):
    return Around(inner, lambda self, states: mixed(self.inner(states)) if self.training else self.inner(states))


def gate(inner):
    # The adapter's gate is zero at first, so that it lets nothing through but gradients.
    zero = torch.nn.Parameter(torch.zeros(()))
    return Around(inner, lambda self, states: (output := self.inner(states)) + self.gate * output.cumsum(1), gate=zero)


def switch(inner):
    return Around(inner, lambda self, states: (mixed if self.on else torch.clone)(self.inner(states)), on=False)


def with_mlp(kind):
    model = llama()
    model.model.layers[0].mlp = kind(model.model.layers[0].mlp)
    return model.eval()


@pytest.mark.parametrize("kind", [only_in_training, gate, mixes_gradients])
def test_what_shows_only_in_training_is_refused_there(kind):
    model = patched(with_mlp(kind).train())
    refused(lambda: model(**labelled()))


def test_a_mode_that_comes_later_is_proven_too():
    model = patched(with_mlp(only_in_training))
    with torch.no_grad():
        model(**told())
    model.train()
    refused(lambda: model(**told()))
    model.eval()
    model.model.layers[0].mlp.train()  # of one module alone
    refused(lambda: model(**told()))


def test_what_begins_to_mix_is_found_at_the_next_power_of_two():
    model = patched(with_mlp(switch))
    for _ in range(5):
        model(**told())
    model.model.layers[0].mlp.on = True
    found = []
    for number in range(6, 9):
        try:
            model(**told())
        except errors.PackingNotIsolated:
            found.append(number)
    assert found == [8]


def test_a_forward_that_takes_the_place_of_another_one_is_noticed():
    # The other forward may lie at the same address.
    model = llama()
    mlp = model.model.layers[0].mlp
    mlp.forward = types.MethodType(lambda self, hidden: type(self).forward(self, hidden), mlp)
    fa2patch.apply(model)
    model(**told())
    del mlp.forward
    mlp.forward = types.MethodType(lambda self, hidden: mixed(type(self).forward(self, hidden)), mlp)
    refused(lambda: model(**told()))


# Heads of one's own


class Reward(transformers.LlamaPreTrainedModel):
    # The forward of this head returns values in one of many forms.

    def __init__(self, config, form):
        super().__init__(config)
        self.model = transformers.LlamaModel(config)
        self.score = torch.nn.Linear(config.hidden_size, 1, bias=False)
        self.form = form
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **more):
        hidden = self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False, **more
        )[0]
        return FORMS[self.form][0](self.score(hidden).squeeze(-1))


FORMS = {
    "a tensor": (lambda values: values, lambda output: output),
    "a dict": (lambda values: {"values": values}, lambda output: output["values"]),
    "a tuple": (lambda values: (values,), lambda output: output[0]),
    "a list": (lambda values: [values], lambda output: output[0]),
    "nested": (lambda values: {"rewards": [values, {"of": values}]}, lambda output: output["rewards"][0]),
}


def reward(form, mixing=False):
    torch.manual_seed(0)
    model = Reward(llama().config, form)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    if mixing:
        model.score.register_forward_hook(lambda module, given, output: mixed(output))
    return model.eval()


@pytest.mark.parametrize("form", FORMS)
def test_a_head_may_return_values_in_any_form(form):
    model, get = reward(form), FORMS[form][1]
    with torch.no_grad():
        expected = torch.cat([get(reward(form)(doc[None]))[0] for doc in DOCS])
        fa2patch.apply(model)
        assert_close(get(model(**told()))[0], expected, "values")


@pytest.mark.parametrize("form", FORMS)
def test_a_head_that_mixes_is_refused_in_any_form(form):
    model = patched(reward(form, mixing=True))
    refused(lambda: model(**told()))


# Threads


@torch.no_grad()
def logits(model, docs):
    return model(**told(docs)).logits[0]


def test_threads_wait_for_the_proof_and_compute_as_without_it():
    batches = [DOCS, [doc.flip(0) for doc in DOCS]]
    expected = [logits_alone(llama(), docs) for docs in batches]
    for _ in range(5):
        model = patched(with_mlp(lambda mlp: Around(mlp, lambda self, states: self.inner(states))))
        for found, truth in zip(in_threads(*(functools.partial(logits, model, docs) for docs in batches)), expected):
            for one in found:
                assert_close(one, truth, "logits")


def test_a_copy_of_a_model_is_proven_by_itself():
    model = patched()
    other = copy.deepcopy(model)
    forward_hook(other)
    model(**told())
    refused(lambda: other(**told()))
