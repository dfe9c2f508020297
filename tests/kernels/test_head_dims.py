"""The head dimensions that kernels are handed: each is padded only where the kernel takes no other."""

import pytest
import torch

from compat_matrix.check.kernel_cases import HEADS, documents
from fa2patch import kernels
from fa2patch.kernels import Options, flex, trial
from fa2patch.kernels.protocol import Kernel
from fa2patch.kernels.reference import Reference

LENGTHS = (4, 6)
CPU = torch.device("cpu")


def handed(name, head_dim, value_dim):
    """The head dimensions of q, k and v that a kernel's ``attend`` is handed, and the tensors."""
    seen = []

    class Watched(type(kernels.named(name))):
        def available(self):
            return True, ""

        def attend(self, q, k, v, boundaries, options, scale):
            seen.extend((q, k, v))
            return v.new_zeros(q.shape[0], q.shape[1], v.shape[2])

    q, k = (torch.zeros(sum(LENGTHS), HEADS, head_dim) for _ in range(2))
    v = torch.zeros(sum(LENGTHS), HEADS, value_dim)
    output = Watched()(q, k, v, documents(LENGTHS), Options())
    assert output.shape == v.shape and output.is_contiguous()
    untouched = [given is got for given, got in zip((q, k, v), seen)]
    dims = tuple(x.shape[-1] for x in seen)
    assert untouched == [given.shape[-1] == got.shape[-1] for given, got in zip((q, k, v), seen)]
    return dims


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("flash_attn", (192, 128), (192, 192)),
        ("flash_attn", (80, 80), (80, 80)),
        ("flash_attn", (100, 60), (104, 104)),
        ("torch_varlen", (192, 128), (192, 192)),
        ("flash_attn_3", (192, 128), (192, 128)),
        ("flash_attn_3", (189, 121), (192, 128)),
        ("flash_attn_3", (160, 128), (160, 128)),
        ("flash_attn_3", (192, 64), (192, 192)),
        ("flash_attn_3", (64, 128), (64, 128)),
        ("flash_attn_3", (96, 64), (96, 96)),
        ("flash_attn_4", (192, 128), (192, 128)),
        ("flash_attn_4", (96, 64), (96, 64)),
        ("flash_attn_4", (192, 96), (192, 192)),
        ("efficient", (192, 128), (192, 128)),
        ("efficient", (100, 60), (104, 64)),
        ("efficient", (60, 100), (64, 104)),
        ("reference", (13, 7), (13, 7)),
    ],
    ids=str,
)
def test_a_kernel_is_handed_the_head_dimensions_that_it_takes(name, given, expected):
    assert handed(name, *given) == (expected[0], *expected)


@pytest.mark.parametrize(
    ("powers", "given", "expected"),
    [
        (False, (192, 128), (192, 128)),
        (False, (100, 60), (104, 64)),
        (False, (8, 6), (16, 16)),
        (True, (192, 128), (256, 128)),
        (True, (80, 80), (128, 128)),
        (True, (64, 128), (128, 128)),
    ],
    ids=str,
)
def test_flex_is_handed_powers_of_two_where_torch_takes_no_other(monkeypatch, powers, given, expected):
    monkeypatch.setattr(flex, "_takes_powers_only", lambda: powers)
    assert handed("flex", *given) == (expected[0], *expected)


class Build(Kernel):
    """A build that says it takes values of another head dimension. ``refuses`` says what it raises for."""

    name = "build"
    DEVICES = None

    def __init__(self, refuses):
        self.refuses, self.tried = refuses, []

    def available(self):
        return True, ""

    def takes(self, head_dim, value_dim):
        return True

    def attend(self, q, k, v, boundaries, options, scale):
        dims = q.shape[-1], v.shape[-1]
        self.tried.append(dims)
        if self.refuses(*dims):
            raise RuntimeError(f"V's head dimension {dims[1]} is not supported")
        return Reference().attend(q, k, v, boundaries, options, scale)


def asks(features=()):
    return kernels.Asked("cpu", torch.bfloat16, HEADS, HEADS, 24, 16, True, tuple(features))


def test_a_build_that_fails_with_values_of_another_dimension_gets_them_padded():
    build = Build(lambda dim, value_dim: dim != value_dim)
    assert trial.passes(build, asks(), CPU) == (True, "")
    assert build.tried == [(24, 16), (24, 24)]
    q, v = torch.ones(sum(LENGTHS), HEADS, 24), torch.ones(sum(LENGTHS), HEADS, 16)
    assert build(q, q, v, documents(LENGTHS), Options()).shape == v.shape
    assert build.tried[2:] == [(24, 24)]


def test_a_build_that_takes_them_is_handed_no_padding():
    build = Build(lambda dim, value_dim: False)
    assert trial.passes(build, asks(), CPU) == (True, "")
    assert build.tried == [(24, 16)]


def test_a_build_that_fails_in_both_ways_is_not_used():
    build = Build(lambda dim, value_dim: True)
    able, reason = trial.passes(build, asks(), CPU)
    assert not able and reason.endswith("RuntimeError: V's head dimension 24 is not supported")
    assert build.tried == [(24, 16), (24, 24)]


def test_another_build_of_the_class_is_not_affected():
    trial.passes(Build(lambda dim, value_dim: dim != value_dim), asks(), CPU)
    assert Build.alike == frozenset()
