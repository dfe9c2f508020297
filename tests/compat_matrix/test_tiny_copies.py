"""Copies of tiny models are deep, and as the model was when they were asked for."""

import torch

from compat_matrix import tiny_copies


def tied():
    model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    model.settings = {"sizes": [3]}
    return model


def test_a_copy_shares_nothing_with_the_module_nor_with_another_copy():
    model = tied()
    expected = model[0].weight.detach().clone()
    copied = tiny_copies.of(model)
    first = copied()
    with torch.no_grad():
        model[0].weight.zero_()
        first[0].weight.zero_()
    first.settings["sizes"].append(4)
    second = copied()
    assert torch.equal(second[0].weight, expected)
    assert second.settings == {"sizes": [3]}


def test_tied_weights_stay_tied_and_trainable():
    copy = tiny_copies.of(tied())()
    assert copy[1].weight is copy[0].weight
    copy(torch.tensor([1, 2])).sum().backward()
    assert isinstance(copy[0].weight, torch.nn.Parameter)
    assert copy[0].weight.grad is not None


def test_a_module_with_a_local_function_is_copied_too():
    model = tied()
    model.local = lambda: 1
    copy = tiny_copies.of(model)()
    assert copy.local() == 1
    assert copy[0].weight is not model[0].weight
