"""Code that nobody knows and that reads the length of the row is refused: packed, a document would differ from itself.
Other documents' tokens do not show it. Noise that does not depend on the length, such as dropout, is no reason.
"""

import pytest
import torch
from small_models import class_of, documents, llama, patched, refusal
from unknown_modules import routed_mlps

import fa2patch
from compat_matrix.check.rows import pack

DOCS = documents(6, 24, 6, 12)


def noise(values):
    # NEFTune's rule.
    scale = 10 / (values.shape[1] * values.shape[2]) ** 0.5
    return values + torch.empty_like(values).uniform_(-scale, scale)


def on_outputs(place, change):
    return lambda model: place(model).register_forward_hook(lambda module, args, output: change(module, output))


def first_layer(model):
    model.model.layers[0].register_forward_pre_hook(lambda module, args: (noise(args[0]), *args[1:]))


class Scaled:
    def forward(self, hidden):
        return super().forward(hidden) * hidden.shape[1] ** -0.5


def own_class(model):
    mlp = mlp_of(model)
    mlp.__class__ = type("Ours", (Scaled, type(mlp)), {})


def mlp_of(model):
    return model.model.layers[0].mlp


in_a_layer = on_outputs(mlp_of, lambda module, output: noise(output))

# The first document of a row has the same places when it is alone.
READ_IT = {
    "first_layer": first_layer,
    "in_a_layer": in_a_layer,
    "without_chance": on_outputs(lambda model: model.model.norm, lambda module, out: out * (1 + 1 / out.shape[1])),
    "on_logits": on_outputs(lambda model: model.lm_head, lambda module, output: noise(output)),
    "own_class": own_class,
    "only_in_training": on_outputs(mlp_of, lambda module, output: noise(output) if module.training else output),
    "place": on_outputs(mlp_of, lambda module, out: out + 0.1 * torch.arange(out.shape[1])[None, :, None].to(out)),
}


@pytest.mark.parametrize("changed", READ_IT.values(), ids=READ_IT)
def test_refused(changed):
    model = patched(change=changed)
    with refusal("length of the row", fa2patch.errors.PackingNotIsolated):
        model.train()(**pack(DOCS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["in_a_layer", "without_chance", "place"])
def test_a_mixture_of_experts_does_not_hide_it(name, dtype):
    # A token that gets another expert by rounding is as far off as this, but few tokens are.
    model = llama()
    routed_mlps(model)
    with refusal("length of the row", fa2patch.errors.PackingNotIsolated):
        patched(model.to(dtype), READ_IT[name]).train()(**pack(DOCS))


def test_little_is_seen_too():
    # The difference is less than a bound that all models hold, and tens of roundings of this one.
    little = on_outputs(lambda model: model.model.norm, lambda module, out: out * (1 + 1e-6 * out.shape[1]))
    with refusal("length of the row", fa2patch.errors.PackingNotIsolated):
        patched(change=little)(**pack(DOCS))


@pytest.mark.parametrize("batch", ["two of one length", "several rows", "padding at the end"])
def test_other_batches(batch):
    model = patched(change=in_a_layer)
    docs = documents(8, 8, 5, 11)
    given = pack(docs[:2])
    if batch == "several rows":
        given = {name: torch.cat([row, pack(docs[2:])[name]]) for name, row in given.items()}
    elif batch == "padding at the end":
        given = {**pack(docs[:3]), "attention_mask": torch.tensor([[1] * 16 + [0] * 5])}
    with pytest.raises(fa2patch.errors.PackingNotIsolated, match="length of the row"):
        model.train()(**given)


first_of_row = on_outputs(mlp_of, lambda module, out: out + out * (torch.arange(out.shape[1]) == 0)[None, :, None])


@pytest.mark.parametrize("changed", [in_a_layer, first_of_row], ids=["noise", "first token of the row"])
@pytest.mark.parametrize("prompts", [[0, 0, 0, 0], [4, 4, 4, 4]], ids=["no prompts", "prompts"])
def test_rows_with_shared_prompts_are_refused(changed, prompts):
    # They are refused also where no document continues another one: the rows state parents, so that the batch is a
    # tree.
    docs = documents(6, 24, 9, 12)
    for number in (1, 3):
        docs[number][:4] = docs[number - 1][:4]
    with refusal("length of the row", fa2patch.errors.PackingNotIsolated):
        patched(change=changed)(**fa2patch.packing.share(docs, prompts=prompts, least=1).batch)


@pytest.mark.parametrize("prompts", [[0, 0, 0, 0], [4, 4, 4, 4]], ids=["no prompts", "prompts"])
def test_rows_with_shared_prompts_are_not_refused(prompts):
    docs = documents(6, 24, 9, 12)
    for number in (1, 3):
        docs[number][:4] = docs[number - 1][:4]
    patched(change=nothing)(**fa2patch.packing.share(docs, prompts=prompts, least=1).batch)


nothing = on_outputs(mlp_of, lambda module, output: 2 * output)

NOT_READ = {
    "dropout": on_outputs(mlp_of, lambda module, output: torch.nn.functional.dropout(output, 0.3)),
    "noise of one size": on_outputs(
        mlp_of, lambda module, output: output + torch.randn_like(output) + torch.rand(output.shape)
    ),
    # what it draws cannot be made constant, so that nothing can be said
    "choices": on_outputs(mlp_of, lambda module, output: output * torch.randint(1, 3, output.shape)),
    "nothing": nothing,
}


@pytest.mark.parametrize("changed", NOT_READ.values(), ids=NOT_READ)
@pytest.mark.parametrize("training", [True, False])
def test_not_refused(changed, training):
    model = patched(change=changed)
    model.train(training)(**pack(DOCS), labels=pack(DOCS)["input_ids"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_what_rounds_is_not_refused(dtype):
    patched(llama().to(dtype), nothing)(**pack(DOCS))


def rounded_by_length(size):
    # After this module one rounding grows, as in a hybrid of random weights. It rounds by a row's length, as scans in
    # chunks do, whose sums are in another order in a longer row. ``size`` is how many roundings it makes.

    def rounded(module, output):
        by_length = 1 + size * torch.finfo(output.dtype).eps * (output.shape[1] > len(DOCS[0]))
        return torch.sin(100 * output * by_length)

    return on_outputs(mlp_of, rounded)


@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "autocast"])
def test_a_rounding_that_grows_is_not_refused(autocast):
    # Qwen3.5 with random weights and LoRA in bfloat16: its documents are 6.5e-2 off alone, and one rounding of its
    # embeddings moves it by 0.9. Under autocast, they are float32, and one rounding of theirs is nothing.
    model = patched(llama() if autocast else llama().to(torch.bfloat16), rounded_by_length(1))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(**pack(DOCS))


def test_more_than_a_rounding_that_grows_is_refused():
    with refusal("length of the row", fa2patch.errors.PackingNotIsolated):
        patched(llama(), rounded_by_length(10_000))(**pack(DOCS))


def test_what_computes_in_less_than_its_weights_is_not_refused():
    # xLSTM does so.
    less = on_outputs(mlp_of, lambda module, output: (output / 3).float().double())
    patched(llama().double(), less)(**pack(DOCS))


def test_dropout_of_attention_is_not_refused():
    # Kernels draw it by themselves.
    patched(llama(attention_dropout=0.3), prove=True).train()(**pack(DOCS))


def test_a_classifier_is_looked_at_too():
    model = patched(llama(class_of("LlamaForSequenceClassification"), num_labels=3), in_a_layer)
    with pytest.raises(fa2patch.errors.PackingNotIsolated, match="length of the row"):
        model.train()(**pack(DOCS), labels=torch.tensor([0, 1, 2, 0]))
