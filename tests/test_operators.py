"""The operators of fa2patch, which are defined when they are first used."""

import threading
import time

import pytest
import torch

from fa2patch import _torch


@pytest.mark.skipif(not _torch.HAS_OPERATORS, reason="torch 2.4")
def test_threads_that_use_an_operator_first_find_it_complete(monkeypatch):
    # torch shows an operator to other threads before it has kernels and gradients.
    register = torch.library.Library.impl

    def slowly(*args, **kwargs):
        time.sleep(0.1)
        return register(*args, **kwargs)

    monkeypatch.setattr(torch.library.Library, "impl", slowly)
    _torch.operator_later(
        "tried_by_threads", lambda x: 2 * x, "(Tensor x) -> Tensor", torch.empty_like, lambda ctx, grad: 2 * grad
    )
    found, begun = [], threading.Barrier(4)

    def use():
        begun.wait()
        if threading.current_thread() is not threads[0]:
            time.sleep(0.05)  # while the first one defines it
        x = torch.ones(2, requires_grad=True)
        torch.ops.fa2patch.tried_by_threads.default(x).sum().backward()
        found.append(x.grad.tolist())

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[2.0, 2.0]] * 4
