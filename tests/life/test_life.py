"""Situations in a patched model's life: threads, replicas, copies, wrappers, other dtypes, interruptions."""

import copy
import warnings

import pytest
import threads
import torch
from adapters import with_lora
from packed_rows import logits
from two_layers import tiny_llama

import fa2patch
from compat_matrix import tiny_models
from compat_matrix.check.compare import assert_close, assert_same_gradients
from compat_matrix.check.rows import alone, documents, gradients, loss_of, pack
from fa2patch import errors
from fa2patch.upstream import forward

LENGTHS = (5, 9, 1, 3)


@pytest.fixture
def docs():
    return documents(*LENGTHS)


@pytest.fixture
def model():
    return tiny_llama()


@pytest.fixture(autouse=True)
def nothing_is_left_inside():
    yield
    assert forward.thread.inside == []


def isolated(model):
    # It raises if documents leak, or if packed differs from alone.
    return fa2patch.verify(model).ok


def leaks(model):
    return not fa2patch.verify(model, strict=False).ok


def trained(model, docs, packed=True):
    loss_of(logits(model, docs) if packed else alone(model, docs), docs).backward()
    return gradients(model)


def expected_gradients(*batches):
    model = tiny_llama()
    for docs in batches:
        loss_of(alone(model, docs), docs).backward()
    return gradients(model)


def in_threads(*works):
    # No forward may be left open in a thread.
    inside = []

    def closed(work):
        return lambda: (work(), inside.extend(forward.thread.inside))[0]

    found = threads.in_threads(*map(closed, works))
    assert inside == []
    return found


# Threads and replicas


def test_models_trained_at_once_do_not_see_each_other(docs):
    # A third model, of the first one's class, is not patched, and also computes a dense batch.
    other, dense = documents(2, 2, 8, 6, seed=1), torch.stack(documents(6, 6, seed=2))
    first, second, unpatched = tiny_llama(), tiny_models.build("mistral", "sdpa"), tiny_llama()
    works = [
        lambda: trained(first, docs),
        lambda: second(**pack(other)).logits,
        lambda: [trained(unpatched, docs), unpatched(input_ids=dense, use_cache=False).logits],
    ]
    for model in (first, second):
        fa2patch.apply(model)
    expected = [work() for work in works]
    found = in_threads(*works)
    assert_same_gradients(expected[0], expected_gradients(docs))
    for one in found[0]:
        assert all(torch.equal(one[name], gradient) for name, gradient in expected[0].items())
    assert all(torch.equal(one, expected[1]) for one in found[1])
    for gradient, output in found[2]:
        assert torch.equal(output, expected[2][1])
        assert all(torch.equal(gradient[name], value) for name, value in expected[2][0].items())
    assert isolated(first) and isolated(second) and leaks(unpatched)


def test_one_model_serves_packed_and_padded_batches_of_several_threads(model, docs):
    fa2patch.apply(model)
    other, dense = documents(2, 2, 8, 6, seed=1), torch.stack(documents(6, 6, seed=2))
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    works = [
        lambda: logits(model, docs),
        lambda: logits(model, other),
        lambda: model(input_ids=dense, attention_mask=mask, use_cache=False).logits,
    ]
    expected = [work() for work in works]
    assert_close(expected[0], alone(tiny_llama(), docs), "logits")
    for results, truth in zip(in_threads(*works), expected):
        assert all(torch.equal(result, truth) for result in results)


def test_data_parallel_around_a_model(docs):
    wrapped = torch.nn.DataParallel(tiny_llama())
    patch = fa2patch.apply(wrapped)
    assert patch is fa2patch.status(wrapped) and patch.model is wrapped.module
    assert isolated(wrapped)
    fa2patch.revert(wrapped)
    assert leaks(wrapped)


def replicate(network):
    # As torch/nn/parallel/replicate.py does it, without copying parameters to another device.
    modules = list(network.modules())
    index = {module: at for at, module in enumerate(modules)}
    copies = [module._replicate_for_data_parallel() for module in modules]
    for module, copied in zip(modules, copies):
        for name, child in module._modules.items():
            copied._modules[name] = None if child is None else copies[index[child]]
        for name, parameter in module._parameters.items():
            if parameter is None:
                copied._parameters[name] = None
            else:
                setattr(copied, name, parameter * 1)
        copied._buffers.update(module._buffers)
    return copies[0]


@pytest.mark.parametrize("warm", [False, True], ids=["first batch", "after a batch of the model's own"])
def test_replicas_of_a_patched_model_in_threads(model, docs, warm):
    fa2patch.apply(model)
    if warm:
        logits(model, docs)
    other = documents(2, 2, 8, 6, seed=1)
    found = in_threads(*[lambda part=part: logits(replicate(model), part) for part in (docs, other)])
    for results, part in zip(found, (docs, other)):
        assert_close(results[0], alone(tiny_llama(), part), "a replica's logits")
        assert all(torch.equal(result, results[0]) for result in results)
    loss_of(logits(replicate(model), docs), docs).backward()
    assert_same_gradients(gradients(model), expected_gradients(docs))


# One batch during another


@pytest.mark.parametrize("backwards", [1, -1], ids=["in order", "in reverse"])
@pytest.mark.parametrize("amid", ["packed", "padded"])
def test_another_batch_between_a_forward_and_its_backward(model, docs, amid, backwards):
    fa2patch.apply(model)
    other = documents(4, 6, seed=1)
    losses = [loss_of(logits(model, docs), docs)]
    if amid == "packed":
        losses.append(loss_of(logits(model, other), other))
    else:
        rows, mask = torch.zeros(2, 6, dtype=torch.long), torch.zeros(2, 6, dtype=torch.long)
        for row, doc in enumerate(other):
            rows[row, : len(doc)], mask[row, : len(doc)] = doc, 1
        padded = model(input_ids=rows, attention_mask=mask, use_cache=False).logits
        losses.append(loss_of(torch.cat([padded[0, :4], padded[1]]), other))
    for loss in losses[::backwards]:
        loss.backward()
    assert_same_gradients(gradients(model), expected_gradients(docs, other))


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize("order", ["apply, checkpointing", "checkpointing, apply", "checkpointing, peft, apply"])
def test_checkpointing_enabled_before_or_after(model, docs, order, reentrant):
    outer, other = model, documents(3, 8, seed=1)
    for step in order.split(", "):
        if step == "apply":
            fa2patch.apply(outer)
        elif step == "checkpointing":
            checkpointed(model, reentrant)
        else:
            outer = with_lora(model)
    outer.train()
    losses = [loss_of(logits(outer, part), part) for part in (docs, other)]
    for loss in losses:
        loss.backward()
    reference = with_lora(tiny_llama()) if "peft" in order else tiny_llama()
    reference.load_state_dict(outer.state_dict())
    for part in (docs, other):
        loss_of(alone(reference, part, use_cache=False), part).backward()
    assert_same_gradients(gradients(outer), gradients(reference))
    assert isolated(outer)


def checkpointed(model, reentrant):
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})


@pytest.mark.parametrize("first", ["apply", "peft"])
def test_adapters_are_trained_isolated_and_merged(model, docs, first):
    if first == "apply":
        fa2patch.apply(model)
    outer = with_lora(model)
    if first == "peft":
        fa2patch.apply(outer)
    assert fa2patch.status(outer) is fa2patch.status(model) is not None
    assert isolated(outer)
    assert_close(logits(outer, docs), alone(outer, docs), "logits of the adapted model")
    merged = outer.merge_and_unload()
    assert fa2patch.status(merged).active and isolated(merged)
    fa2patch.revert(merged)
    assert leaks(merged)


# Copies


def test_a_reloaded_model_is_unpatched_and_patchable(model, docs, tmp_path):
    expected, names = alone(model, docs), list(model.state_dict())
    patch = fa2patch.apply(model)
    assert list(model.state_dict()) == names
    model.save_pretrained(tmp_path)
    assert not any(b"fa2patch" in file.read_bytes() for file in tmp_path.iterdir())
    reloaded = type(model).from_pretrained(tmp_path).eval()
    assert fa2patch.status(reloaded) is None and leaks(reloaded)
    fa2patch.apply(reloaded)
    patch.revert()
    assert_close(logits(reloaded, docs), expected, "the reloaded model's logits")
    assert isolated(reloaded) and leaks(model)


def test_a_copy_of_what_holds_a_patched_and_an_unpatched_model_holds_both(docs):
    pair = torch.nn.ModuleDict({"patched": tiny_llama(), "plain": tiny_llama()})
    fa2patch.apply(pair["patched"])
    copied = copy.deepcopy(pair)
    fa2patch.revert(pair["patched"])
    assert isolated(copied["patched"])
    assert leaks(copied["plain"]) and leaks(pair["patched"])


def test_an_average_of_the_weights_is_patched_too(model):
    fa2patch.apply(model)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    fa2patch.revert(model)
    averaged.update_parameters(model)
    assert isolated(averaged)


# Other weights


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_cast_model_stays_patched(model, dtype):
    fa2patch.apply(model)
    assert isolated(model.to(dtype))
    bound = fa2patch.verify(model).distance_bound  # up to 4.44 Llama's logits are float32 in every dtype
    assert bound >= 5e-2 if dtype is torch.bfloat16 else bound <= 1e-4


def test_resized_embeddings_stay_patched(model):
    fa2patch.apply(model)
    model.resize_token_embeddings(140)
    assert model(torch.tensor([[135, 139]])).logits.shape == (1, 2, 140)
    assert isolated(model)


# Reverted in the middle


def test_a_revert_between_two_steps_of_training(docs):
    model, other = tiny_llama(), tiny_llama()
    patches = [fa2patch.apply(one) for one in (model, other)]
    optimizers = [torch.optim.SGD(one.parameters(), lr=1e-3) for one in (model, other)]
    losses = []
    for step in range(6):
        if step == 3:
            patches[0].revert()
        for one, optimizer in zip((model, other), optimizers):
            loss = loss_of(logits(one, docs), docs)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[0:6:2] == losses[1:6:2] and losses[6] != losses[7]
    assert losses[9] < losses[1] and all(map(torch.isfinite, torch.tensor(losses)))
    assert leaks(model) and isolated(other)


def test_a_revert_between_a_forward_and_its_backward(model, docs):
    patch = fa2patch.apply(model)
    loss = loss_of(logits(model, docs), docs)
    patch.revert()
    loss.backward()
    assert_same_gradients(gradients(model), expected_gradients(docs))


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize("others", [False, True], ids=["the last patched model", "another is patched"])
def test_a_revert_before_a_checkpoints_recompute_leaks_nothing(model, docs, others, reentrant):
    other = tiny_llama()
    if others:
        fa2patch.apply(other)
    patch = fa2patch.apply(model)
    checkpointed(model, reentrant)
    loss = loss_of(logits(model.train(), docs), docs)
    patch.revert()
    if others:
        loss.backward()
        assert_same_gradients(gradients(model), expected_gradients(docs))
    else:
        with pytest.raises((TypeError, errors.PackingNotIsolated), match="PackedMask"):
            loss.backward()


# Interrupted in the middle


class OutOfMemoryError(RuntimeError):
    # It has the name of torch's error, which exists only in builds with CUDA.
    pass


INTERRUPTIONS = [OutOfMemoryError, KeyboardInterrupt]


def raising(error):
    def hook(*args):
        raise error("in the middle")

    return hook


@pytest.mark.parametrize("interruption", INTERRUPTIONS)
@pytest.mark.parametrize("where", ["model.layers.1.self_attn", "model.layers.1.mlp", "model.norm", "lm_head"])
@pytest.mark.parametrize("batch", ["packed", "packed, with labels", "padded", "padded, with labels"])
def test_an_interrupted_forward_leaves_the_patch_usable(model, docs, batch, where, interruption):
    patch = fa2patch.apply(model)
    call = pack(docs)
    if "padded" in batch:
        call["attention_mask"] = (torch.arange(sum(LENGTHS)) < 9).long()[None]
        del call["position_ids"]
    if "labels" in batch:
        call["labels"] = call["input_ids"].clone()
    handle = model.get_submodule(where).register_forward_pre_hook(raising(interruption))
    with pytest.raises(interruption, match="in the middle"):
        model(**call)
    handle.remove()
    assert forward.thread.inside == []
    assert {layer.state for layer in patch.layers} == {"applied"}
    assert_close(logits(model, docs), alone(tiny_llama(), docs), "the next forward's logits")


def test_an_interrupted_recompute_leaves_the_patch_usable(model, docs):
    fa2patch.apply(model)
    checkpointed(model, reentrant=False)
    loss = loss_of(logits(model.train(), docs), docs)
    handle = model.model.layers[0].self_attn.register_forward_pre_hook(raising(OutOfMemoryError))
    with pytest.raises(OutOfMemoryError):
        loss.backward()
    handle.remove()
    model.zero_grad()
    assert forward.thread.inside == []
    assert_same_gradients(trained(model, docs), expected_gradients(docs))


def test_an_interrupted_thread_leaves_others_alone(model, docs):
    fa2patch.apply(model)
    torn = tiny_llama()
    fa2patch.apply(torn)
    torn.model.layers[1].register_forward_pre_hook(raising(KeyboardInterrupt))

    def interrupted():
        with pytest.raises(KeyboardInterrupt):
            torn(input_ids=torch.cat(docs)[None])

    found, _ = in_threads(lambda: logits(model, docs), interrupted)
    assert_close(found[0], alone(tiny_llama(), docs), "logits")


def test_a_verification_that_is_interrupted_leaves_the_model_as_it_was(model):
    fa2patch.apply(model.train())
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    handle = model.model.layers[1].register_forward_pre_hook(raising(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        fa2patch.verify(model)
    handle.remove()
    assert model.training and all(parameter.grad is None for parameter in model.parameters())
    assert not model.model.embed_tokens._forward_hooks
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert isolated(model)


# Compiled (last, because the compiler's objects make every collection slow)


def test_what_is_compiled_already_follows_apply_and_revert(docs):
    torch._dynamo.reset()
    model = tiny_models.build("llama", "sdpa", num_hidden_layers=1)
    expected = alone(model, docs)
    truth = trained(model, docs, packed=False)
    compiled = torch.compile(model, backend="eager")
    leaking = logits(compiled, docs)
    assert (leaking - expected).abs().max() > 1e-2 * expected.abs().max()
    fa2patch.apply(model)
    found = logits(compiled, docs)
    assert_close(found, expected, "logits")
    loss_of(found, docs).backward()
    assert_same_gradients(gradients(model), truth)
    fa2patch.revert(compiled)
    assert_close(logits(compiled, docs), leaking, "logits as before apply")


class TestNothingPacked:
    # TRL 0.19 joins examples without position ids if the model is not named flash_attention_2.

    @staticmethod
    def warned(model, batch, times=forward.SAY_AFTER):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(times):
                model(**batch)
        return [w for w in caught if w.category is errors.NothingPacked]

    def test_training_on_rows_that_say_nothing_warns_once(self, model, docs):
        fa2patch.apply(model.train())
        joined = {"input_ids": torch.cat(docs)[None], "attention_mask": torch.ones(1, sum(LENGTHS))}
        assert not self.warned(model, joined, forward.SAY_AFTER - 1)
        [warning] = self.warned(model, joined)
        assert "TRL" in str(warning.message) and "DataCollatorWithFlattening" in str(warning.message)
        assert not self.warned(model, joined)

    def test_a_compiled_model_warns_once_and_no_batch_makes_a_graph_of_its_own(self, model, docs):
        graphs = []

        def counted(graph, inputs):
            graphs.append(graph)
            return graph.forward

        fa2patch.apply(model.train())
        torch._dynamo.reset()
        joined = {"input_ids": torch.cat(docs)[None], "attention_mask": torch.ones(1, sum(LENGTHS))}
        compiled = torch.compile(model, backend=counted)
        [warning] = self.warned(compiled, joined, 2)
        assert "a graph was compiled for training batches" in str(warning.message)
        made = len(graphs)
        assert made and not self.warned(compiled, joined, 2 * forward.SAY_AFTER)
        assert len(graphs) == made

    def test_a_packed_batch_says_that_all_is_well(self, model, docs):
        fa2patch.apply(model.train())
        model(**pack(docs))
        assert not self.warned(model, {"input_ids": docs[0][None]})

    def test_nothing_is_said_of_evaluation_or_of_single_documents_with_positions(self, model, docs):
        fa2patch.apply(model)
        model.train()
        assert not self.warned(model, pack(docs[:1]))
        model.eval()
        assert not self.warned(model, {"input_ids": docs[0][None]})
        with torch.no_grad():
            assert not self.warned(model.train(), {"input_ids": docs[0][None]})
