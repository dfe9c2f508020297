"""Noise on the embeddings (NEFTune) has the size that padded training gives each document, or the batch is refused."""

import copy
import functools
import inspect
import pickle

import pytest
import torch
import transformers
from small_models import assert_says_enough, llama, of_family, padded, patched, refusal, without_dropout

import fa2patch
from compat_matrix.check.rows import documents, pack
from fa2patch.upstream import inspecting

DOCS = documents(6, 24, 6, 12, 24)
ALPHA = 40.0

# The noise of a document is measured in 6 x 16 numbers or more, whose deviation is known to a few percent.
NEAR = 0.08


def upstreams_hook():
    # Trainer registers this hook of Transformers with ``neftune_noise_alpha``.
    try:
        from transformers.integrations.neftune import neftune_post_forward_hook
    except ImportError:
        neftune_post_forward_hook = getattr(transformers.trainer_utils, "neftune_post_forward_hook", None)
    if neftune_post_forward_hook is None:
        pytest.skip(f"Transformers {transformers.__version__} has no NEFTune")
    return neftune_post_forward_hook


def magnitude(output):
    return ALPHA / (output.shape[1] * output.shape[2]) ** 0.5


def returns_noise(module, args, output):
    # Normal noise instead of uniform noise.
    return output + torch.randn_like(output) * magnitude(output) if module.training else output


def changes_in_place(module, args, output):
    if module.training:
        with torch.no_grad():
            output += torch.empty_like(output).uniform_(-magnitude(output), magnitude(output))


def takes_keywords(module, args, kwargs, output):
    return returns_noise(module, args, output)


def drawn(like):
    return torch.rand_like(like) * 2 - 1


def draws_in_another_function(module, args, output):
    return output + drawn(output) * magnitude(output) if module.training else output


class Drawing:
    # A hook that is an object with a state of its own.

    def __init__(self, alpha):
        self.alpha = alpha

    def __call__(self, module, args, output):
        scale = self.alpha / (output.shape[1] * output.shape[2]) ** 0.5
        return output + torch.empty_like(output).uniform_(-scale, scale) if module.training else output


def with_upstreams_hook(model):
    table = model.get_input_embeddings()
    table.neftune_noise_alpha = ALPHA
    return table.register_forward_hook(upstreams_hook())


def with_hook(hook, **options):
    return lambda model: model.get_input_embeddings().register_forward_hook(hook, **options)


def with_forward(model):
    # The authors of NEFTune, TRL 0.7.1 and axolotl replace the embedding's forward on the object.
    table = model.get_input_embeddings()
    own = table.forward

    def noised(ids):
        output = own(ids)
        if not model.training:
            return output
        scale = magnitude(output)
        return output + torch.zeros_like(output).uniform_(-scale, scale)

    table.forward = noised


class Noisy(torch.nn.Embedding):
    def forward(self, ids):
        output = super().forward(ids)
        return returns_noise(self, (ids,), output)


def with_class(model):
    model.get_input_embeddings().__class__ = Noisy


class Around(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    @property
    def weight(self):
        return self.inner.weight

    def forward(self, ids):
        return returns_noise(self, (ids,), self.inner(ids))


def with_module(model):
    model.set_input_embeddings(Around(model.get_input_embeddings()))


WAYS = {
    "upstream": with_upstreams_hook,
    "normal": with_hook(returns_noise),
    "in place": with_hook(changes_in_place),
    "keywords": with_hook(takes_keywords, with_kwargs=True),
    "partial": with_hook(functools.partial(returns_noise)),
    "another function": with_hook(draws_in_another_function),
    "object": with_hook(Drawing(ALPHA)),
    "forward": with_forward,
    "class": with_class,
    "module": with_module,
}


def deviations(noise, docs=DOCS):
    # The deviation of the noise in each document is relative to NEFTune's rule.
    if noise.shape[0] == 1:
        pieces = noise[0].split([len(doc) for doc in docs])
    else:
        pieces = [row[: len(doc)] for row, doc in zip(noise, docs)]
    return [float(piece.std()) * piece.numel() ** 0.5 / ALPHA for piece in pieces]


def sizes(model, batch, docs=DOCS):
    # The deviations are those that the first layer sees.
    table, seen = model.get_input_embeddings(), []
    handle = table.register_forward_hook(lambda module, args, output: seen.append(output.detach().clone()))
    torch.manual_seed(1)
    model.train()(**batch)
    handle.remove()  # the calls before the last are those of a proof
    return deviations(seen[-1] - table.weight[batch["input_ids"]].detach(), docs)


def assert_of_each_document(found, expected):
    # Every document's noise has the size that it has in a batch of its own.
    for one in found:
        assert abs(one / expected - 1) < 2 * NEAR, (found, expected)


@functools.cache
def alone(way):
    # The document has 200 tokens, so that its deviation is known well.
    model = llama()
    way(model)
    long = documents(200)
    return sizes(model, {"input_ids": long[0][None]}, long)[0]


def noised(way=with_upstreams_hook, **changes):
    model = llama(**changes)
    way(model)
    return patched(model)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("first", ["noise", "apply"])
def test_right(way, first):
    model = patched() if first == "apply" else llama()
    WAYS[way](model)
    if first == "noise":
        fa2patch.apply(model)
    assert_of_each_document(sizes(model, pack(DOCS)), alone(WAYS[way]))


def test_it_would_be_seen():
    # Without the patch the row's noise is smaller by the root of its documents' number.
    model = llama()
    with_upstreams_hook(model)
    found = sizes(model, pack(DOCS))
    assert max(found) < 0.85 * alone(with_upstreams_hook)


@pytest.mark.parametrize("family", ["gpt2", "mistral", "bert:masked"])
def test_other_families(family):
    # GPT-2 makes other ids on the way to its embedding. That is an error if noise is added, and no error without.
    model = without_dropout(of_family(family))
    with_upstreams_hook(model)
    fa2patch.apply(model)
    with torch.no_grad():
        model.eval()(**pack(DOCS))
    try:
        found = sizes(model, pack(DOCS))
    except fa2patch.errors.PackingNotIsolated as error:
        assert family == "gpt2"
        assert_says_enough(error)
    else:
        assert_of_each_document(found, alone(with_upstreams_hook))


@pytest.mark.parametrize("way", ["upstream", "in place", "normal"])
def test_padded_batches_that_are_computed_packed(way):
    model, batch = llama(), padded(DOCS)
    WAYS[way](model)
    fa2patch.apply(model, padded_batches=True)
    table, seen = model.get_input_embeddings(), []
    table.register_forward_hook(lambda module, args, output: seen.append((args[0], output.detach().clone())))
    model.train()(batch["input_ids"], batch["attention_mask"])
    noise = seen[-1][1] - table.weight[seen[-1][0]].detach()
    assert noise.shape[:2] == (1, sum(map(len, DOCS)))
    assert_of_each_document(deviations(noise), alone(WAYS[way]))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("hook", [changes_in_place, returns_noise])
def test_ids_that_lost_their_documents_on_the_way(hook, mode):
    model = llama()
    table = model.get_input_embeddings()
    table.register_forward_pre_hook(lambda module, args: (args[0].clone(),))
    table.register_forward_hook(hook)
    fa2patch.apply(model, prove=False)
    with mode():
        with refusal(error=fa2patch.errors.PackingNotIsolated):
            model.train()(**pack(DOCS))
        model.eval()(**pack(DOCS))  # no noise


@pytest.mark.parametrize("way", WAYS)
def test_dense_batches_in_inference_mode(way):
    # Tensors of inference mode do not count changes in place.
    model = noised(WAYS[way]).eval()
    with torch.inference_mode():
        model(input_ids=torch.stack(documents(24, 24)))


def test_dense_batches_keep_the_noise_of_their_row():
    results = []
    for prepare in (lambda model: model, patched):
        model = llama()
        with_upstreams_hook(model)
        torch.manual_seed(3)
        results.append(prepare(model).train()(input_ids=torch.stack(documents(24, 24))).logits)
    assert torch.equal(*results)


def test_evaluation_has_no_noise():
    model = patched()
    expected = model(**pack(DOCS)).logits
    with_upstreams_hook(model)
    assert torch.equal(model(**pack(DOCS)).logits, expected)


def test_copies_pickles_and_revert():
    model = noised()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_of_each_document(sizes(copied, pack(DOCS)), alone(with_upstreams_hook))
    fa2patch.revert(model)
    assert list(model.get_input_embeddings()._forward_hooks.values()) == [upstreams_hook()]


@pytest.mark.parametrize("way", ["forward", "class", "module"])
def test_copies_and_revert_of_forwards(way):
    model = llama()
    WAYS[way](model)
    before = dict(vars(model.get_input_embeddings()))
    fa2patch.apply(model)
    for copied in () if way == "forward" else (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_of_each_document(sizes(copied, pack(DOCS)), alone(WAYS[way]))  # a forward is bound to the first model
    fa2patch.revert(model)
    after = vars(model.get_input_embeddings())
    assert after.keys() == before.keys()
    assert after.get("forward") is before.get("forward")


def test_who_registered_the_hook_can_remove_it():
    model = llama()
    handle = with_upstreams_hook(model)
    fa2patch.apply(model)
    sizes(model, pack(DOCS))
    handle.remove()
    assert not model.get_input_embeddings()._forward_hooks
    assert sizes(model, pack(DOCS)) == [0.0] * len(DOCS)


def test_hooks_that_draw_nothing_are_left_alone():
    # Such hooks are those of PEFT's gradient checkpointing, and those that take the embeddings' gradients.
    model = llama()
    model.enable_input_require_grads()
    leaves = []
    model.get_input_embeddings().register_forward_hook(
        lambda module, args, output: leaves.append(output.detach().requires_grad_()) or leaves[-1] * 1
    )
    fa2patch.apply(model, prove=False)
    model.train()(**pack(DOCS)).logits.sum().backward()
    assert len(leaves) == 1
    assert leaves[0].grad.shape[:2] == (1, sum(map(len, DOCS)))


@pytest.mark.parametrize("hook, expected", [
    (returns_noise, True), (draws_in_another_function, True), (Drawing(1.0), True), (functools.partial(drawn), True),
    (lambda module, args, output: output * output.shape[1] ** -0.5, False), (torch.nn.Linear(2, 2), False),
])  # fmt: skip
def test_what_draws(hook, expected):
    assert inspecting.draws(hook) is expected


def test_trainers_option(tmp_path):
    # Trainer registers the hook when training begins, and removes it at the end.
    pytest.importorskip("accelerate")
    takes = inspect.signature(transformers.TrainingArguments).parameters
    if "neftune_noise_alpha" not in takes:
        pytest.skip(f"Trainer of Transformers {transformers.__version__} has no NEFTune")
    model, found = patched(), []

    class Seeing(transformers.Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            given = {name: inputs[name] for name in ("input_ids", "position_ids")}
            found.extend(sizes(model, given, [DOCS[0]] * 5))
            return super().compute_loss(model, inputs, *args, **kwargs)

    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=1, per_device_train_batch_size=5, report_to=[], save_strategy="no", disable_tqdm=True,
        neftune_noise_alpha=ALPHA, **({"use_cpu": True} if "use_cpu" in takes else {"no_cuda": True}),
    )  # fmt: skip
    collate = fa2patch.DataCollatorWithFlattening()
    Seeing(model, arguments, train_dataset=[{"input_ids": DOCS[2]}] * 5, data_collator=collate).train()
    assert_of_each_document(found, alone(with_upstreams_hook))
    assert not model.get_input_embeddings()._forward_hooks


@pytest.mark.parametrize("way", ["upstream", "forward"])
def test_compiled(way):
    # The lengths of documents have no values while a graph is captured.
    torch._dynamo.reset()
    model, seen = noised(WAYS[way], num_hidden_layers=1), []
    model.model.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].detach().clone()))
    batch = pack(DOCS)
    torch.compile(model.train(), backend="eager")(**batch)
    noise = seen[-1] - model.get_input_embeddings().weight[batch["input_ids"]].detach()
    assert_of_each_document(deviations(noise), alone(WAYS[way]))
    torch._dynamo.reset()
