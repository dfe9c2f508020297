"""The kernel that looks at stated boundaries in one launch: under Triton's interpreter, and compiled for devices."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
import torch

from fa2patch import errors
from fa2patch.documents.given_boundaries import from_cu_seqlens

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def triton_check():
    pytest.importorskip("triton", reason="Triton is a part of torch with CUDA only")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton computes on a CPU only with TRITON_INTERPRET=1")
    from fa2patch.documents import triton_check

    return triton_check


def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def test_it_tells_right_rows_from_wrong_ones(triton_check, finding):
    finding["cases"] = len([*triton_check.cases()])
    assert triton_check.tells(CPU)
    kinds = {case.holds for case in triton_check.cases()}
    assert kinds == {True, False}


@pytest.mark.parametrize("says", [0, 1])
def test_a_kernel_that_always_says_the_same_is_not_believed(triton_check, monkeypatch, says):
    monkeypatch.setattr(triton_check, "looked_at", lambda *given: torch.tensor(says))
    assert not triton_check.tells(CPU)


def made_at_random(seed):
    # Boundaries and ids agree, and then one number of them is changed in most cases.
    drawn = random.Random(seed)
    batch, length = drawn.choice([(1, 2), (1, 9), (1, 64), (2, 7), (3, 5)])
    tokens = batch * length
    rows = [*range(0, tokens, length)]
    ends = sorted({*rows, *drawn.sample(range(tokens), drawn.randrange(min(tokens, 6))), tokens})
    ends += [tokens] * drawn.randrange(2)
    counted = [at - max(end for end in ends if end <= at) for at in range(tokens)]
    keys, longest = ends[:], max(b - a for a, b in zip(ends, ends[1:]))
    what = drawn.choice(["nothing", "ends", "ids", "keys", "longest", "fewer"])
    if what == "longest":
        longest -= 1
    elif what == "fewer" and len(ends) > 2:
        ends.pop(drawn.randrange(1, len(ends) - 1))
        keys = ends
        longest = tokens
    elif what in ("ends", "ids", "keys"):
        changed = {"ends": ends, "ids": counted, "keys": keys}[what]
        changed[drawn.randrange(len(changed))] += drawn.choice([-1, 1])
    ids = torch.tensor(counted, dtype=drawn.choice([torch.int64, torch.int32])).view(batch, length)
    if drawn.random() < 0.5:  # not contiguous
        ids = torch.stack([ids, ids], -1)[..., 0]
    return ints(*ends), ints(*keys), (batch, length), drawn.choice([ids, ids, None]), drawn.choice([longest, None])


def test_it_says_what_the_operators_say(triton_check, finding):
    said = []
    for seed in range(300):
        ends, keys, shape, ids, longest = made_at_random(seed)
        try:
            from_cu_seqlens(ends, longest, shape, cu_seqlens_k=keys, position_ids=ids)
            said.append(True)
        except errors.Fa2PatchError:
            said.append(False)
        assert bool(triton_check.looked_at(ends, keys, shape, ids, longest)) is said[-1], seed
    finding["right"], finding["wrong"] = sum(said), 300 - sum(said)
    assert 100 < sum(said) < 200


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from fa2patch.documents import triton_check

numbers = dict.fromkeys(("documents", "tokens", "length", "longest", "row_stride", "stride", "steps"), "i32")
for target in (*(GPUTarget("cuda", arch, 32) for arch in (80, 90, 100)), GPUTarget("hip", "gfx942", 64)):
    for ids in ("*i64", "*i32"):
        kinds = {"held": "*i32", "ends": "*i32", "ends_of_keys": "*i32", "ids": ids, **numbers}
        flags = {"HAS_KEYS": True, "HAS_IDS": True, "BLOCK": triton_check._BLOCK}
        source = ASTSource(triton_check._look, {**kinds, **dict.fromkeys(flags, "constexpr")}, flags)
        print(target.arch, ids, *triton.compile(source, target=target).asm)
"""


def test_it_compiles_for_devices_that_are_not_here(triton_check, finding):
    told = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILED], env=told, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    finding["compiled"] = lines = done.stdout.splitlines()
    assert len(lines) == 8
    assert all(line.split()[-1] in ("cubin", "hsaco") for line in lines)
