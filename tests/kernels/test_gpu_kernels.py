"""Every kernel that can run on this GPU, with every feature that it claims, and whole models: ``pytest -m gpu``."""

import subprocess
import sys

import pytest
import torch

import fa2patch
from compat_matrix import commits, tiny_models
from compat_matrix.bench.static_shapes import KINDS, layouts
from compat_matrix.check.kernel_cases import documents, states
from compat_matrix.check.kernels import FEATURES, HEADS, LENGTHS, PARENTS, Case, compared, refusal
from compat_matrix.gpu.models import big, cell
from fa2patch import kernels
from fa2patch.documents import given_boundaries
from fa2patch.errors import PackingNotIsolated
from fa2patch.kernels import Options, packed_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

KERNELS = [kernel for kernel in kernels.ORDER if kernel.name != "reference"]


@pytest.fixture(params=KERNELS, ids=lambda kernel: kernel.name)
def kernel(request):
    able, reason = request.param.available()
    if not able:
        pytest.skip(reason)
    return request.param


def able_or_skip(kernel, rows, options, trees=False):
    able, reason = kernel.supports(kernels.asked_by(*rows, options, trees))
    if not able:
        pytest.skip(reason)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("groups", [1, 4], ids=["MHA", "MQA"])
@pytest.mark.parametrize("layout", ["causal", "both ways", "tree"])
@pytest.mark.parametrize("feature", FEATURES)
def test_a_kernel_equals_the_reference(kernel, feature, layout, groups, dim, dtype):
    case = Case(feature, layout, groups, dim, dim, dtype)
    reason = refusal(kernel, case, "cuda")
    if reason:
        pytest.skip(reason)
    errors = compared(kernel, case, "cuda")
    assert {name: error for name, error in errors.items() if not error.ok} == {}


@pytest.mark.parametrize("feature", FEATURES)
def test_a_kernel_isolates_documents(kernel, feature):
    options = Case(feature).options("cuda")
    q, k, v = states(LENGTHS, dtype=torch.bfloat16, dim=64, value_dim=64, device="cuda", heads=HEADS)
    able_or_skip(kernel, (q, k, v), options)
    before = kernel(q, k, v, documents(LENGTHS, "cuda"), options).split(LENGTHS)
    gradients = torch.autograd.grad(before[2].float().square().sum(), [q, k, v])
    for name, gradient in zip("qkv", gradients):
        first, second, own, last = (bool(piece.any()) for piece in gradient.split(LENGTHS))
        assert not (first or second or last), name
        assert own or (name != "v" and options.window == 1)  # a token that sees only itself has the weight 1, rounded
    with torch.no_grad():
        for tensor in (q, k, v):
            tensor.split(LENGTHS)[1].add_(1)
    after = kernel(q, k, v, documents(LENGTHS, "cuda"), options).split(LENGTHS)
    assert [torch.equal(a, b) for a, b in zip(before, after)] == [True, False, True, True]


@pytest.mark.parametrize("layout", ["causal", "both ways"])
def test_documents_without_tokens(kernel, layout):
    # The collator's ``max_documents`` makes such documents.
    case = Case(layout=layout, lengths=(1, 200, 77, 130, 0, 0, 0))
    reason = refusal(kernel, case, "cuda")
    if reason:
        pytest.skip(reason)
    assert {name: error for name, error in compared(kernel, case, "cuda").items() if not error.ok} == {}


@pytest.mark.parametrize("dim, value_dim", [(60, 60), (192, 128), (256, 256), (512, 512)], ids=str)
def test_other_head_dimensions(kernel, dim, value_dim):
    rows = states(LENGTHS, dtype=torch.bfloat16, groups=2, dim=dim, value_dim=value_dim, device="cuda", heads=HEADS)
    able_or_skip(kernel, rows, Options())
    assert kernels.pick(kernel.name, kernels.asked_by(*rows, Options()), rows[0].device).kernel is kernel


@pytest.mark.parametrize("feature", FEATURES)
def test_a_kernel_isolates_the_branches_of_a_tree(kernel, feature):
    options = Case(feature).options("cuda")
    q, k, v = states(LENGTHS, dtype=torch.bfloat16, dim=64, value_dim=64, device="cuda", heads=HEADS)
    able_or_skip(kernel, (q, k, v), options, trees=True)
    boundaries = documents(LENGTHS, "cuda", PARENTS)
    before = kernel(q, k, v, boundaries, options).split(LENGTHS)
    (gradient,) = torch.autograd.grad(before[2].float().square().sum(), [v])
    sees_the_parent = options.window != 1
    assert [bool(piece.any()) for piece in gradient.split(LENGTHS)] == [False, sees_the_parent, True, False]
    with torch.no_grad():
        for tensor in (q, k, v):
            tensor.split(LENGTHS)[3].add_(1)
    after = kernel(q, k, v, boundaries, options).split(LENGTHS)
    assert [torch.equal(a, b) for a, b in zip(before, after)] == [True, True, True, False]


def test_every_kernel_here_passes_its_trial(kernel):
    for features in ((), *((name,) for name in kernels.FEATURES if name in kernel.features() and name != "dropout")):
        for dtype in kernel.DTYPES or (torch.bfloat16,):
            asked = kernels.Asked("cuda", dtype, 8, 2, 64, 64, True, features)
            assert kernels.pick(kernel.name, asked, torch.device("cuda")).kernel is kernel


def test_a_call_waits_for_nothing(kernel):
    rows = [
        tensor.detach()[None]
        for tensor in states(LENGTHS, dtype=torch.bfloat16, dim=64, value_dim=64, device="cuda", heads=HEADS)
    ]
    boundaries = documents(LENGTHS, "cuda")
    packed_attention(*rows, boundaries, Options(), kernel)
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        output = packed_attention(*rows, boundaries, Options(), kernel)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert output.is_contiguous()
    assert boundaries._lengths is None


def lengthy(*lengths, **options):
    collate = fa2patch.DataCollatorWithFlattening(return_flash_attn_kwargs=True, **options)
    made = collate([{"input_ids": [3 + i % 60 for i in range(length)]} for length in lengths])
    moved = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in made.items()}
    return {**moved, "use_cache": False}


def llama(kernel="auto"):
    model = tiny_models.build("llama", "sdpa", torch.bfloat16, **big("llama")).cuda()
    fa2patch.apply(model, kernel=kernel)
    return model


def assert_near(found, expected):
    assert (found - expected).abs().max() <= 5e-2 * expected.abs().max()


@pytest.mark.parametrize("name", ["auto", "flex"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_steps_of_twenty_layouts_have_two_graphs(mode, name):
    # ``reduce-overhead`` records new CUDA graphs if the longest length changes. Results stay right.
    if name == "flex" and mode != "default":
        pytest.skip("a compiled kernel within a CUDA graph of its own")
    model = llama(name).train()
    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, mode=mode, fullgraph=True)
    for lengths in [row for row in layouts(30) if len(row) > 1][:20]:  # torch has a graph of its own for sizes of 1
        batch = lengthy(*lengths)
        found = compiled(**batch)
        found.loss.backward()
        assert_near(found.logits.detach().clone(), model(**batch).logits.detach())
    assert counters["stats"]["unique_graphs"] <= 2


def test_one_captured_graph_computes_thirty_layouts_of_the_same_shapes():
    model, still = llama(), KINDS["one shape"]
    held, others = lengthy(32, 32, **still), [lengthy(*lengths, **still) for lengths in layouts(30)]
    with torch.no_grad():
        expected = [model(**other).logits for other in others]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = model(**held).logits
        for other, logits in zip(others, expected):
            for name, value in other.items():
                if isinstance(value, torch.Tensor):
                    held[name].copy_(value)
            graph.replay()
            assert_near(found, logits)


def test_a_step_on_another_stream_has_the_same_gradients():
    found, busy = [], torch.randn(4096, 4096, device="cuda")
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        model, batch = llama(), lengthy(50, 9, 77)
        torch.cuda.synchronize()
        for _ in range(50):  # work that is not done when the step begins
            busy = (busy @ busy).clamp(-1, 1)
        with torch.cuda.stream(stream):
            model(**batch).loss.backward()
        torch.cuda.synchronize()
        found.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*found):
        assert_near(one, other)


WRONG = {
    "lengths that end too early": "row['cu_seq_lens_q'][-1] -= 1",
    "keys of other documents": "row['cu_seq_lens_k'] = row['cu_seq_lens_k'].flip(0)",
    "ids that restart elsewhere": "row['position_ids'][0, 7] = 0",
    "a longest document that is too short": "row.update(max_length_q=3, max_length_k=3)",
}
SCRIPT = """
import sys
sys.path.insert(0, "tests/kernels")
from test_gpu_kernels import lengthy, llama
row = lengthy(9, 5, 12)
{}
print(llama()(**row).loss.item())
"""


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_lengths_end_the_process_with_an_error_that_names_them(kind):
    # an assertion of the device leaves a process that computes nothing more
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(WRONG[kind])], cwd=commits.ROOT, capture_output=True, text=True
    )
    assert done.returncode and any(name in done.stderr for name in ("cu_seq_lens", "position_ids", "max_length"))


def test_tritons_check_of_lengths_says_what_the_operators_say():
    kernel = given_boundaries._kernel()
    if kernel is None:
        pytest.skip("triton is not installed")
    for case in kernel.cases():
        ends, keys, shape, ids, longest = kernel._tensors(case, torch.device("cuda"))
        checks = given_boundaries._ends(ends, shape[0] * shape[1], longest)
        checks += given_boundaries._agreement(ends, shape, ids, None, False)
        holds = all(bool(each.held) for each in checks) and (keys is None or torch.equal(ends, keys))
        assert bool(kernel.looked_at(ends, keys, shape, ids, longest)) == holds == case.holds, case


def test_a_captured_graph_without_lengths_is_refused():
    model = llama()
    batch = lengthy(50, 130)
    batch = {name: value for name, value in batch.items() if not name.startswith(("cu_seq_lens", "max_length"))}
    model(**batch)
    with (
        pytest.raises(PackingNotIsolated, match="a CUDA graph is being captured"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        model(**batch)


@pytest.mark.parametrize("name", [kernel.name for kernel in kernels.ORDER])
@pytest.mark.parametrize("family", tiny_models.SEEDS)
def test_a_model_is_right(family, name):
    able, reason = kernels.named(name).available()
    if not able:
        pytest.skip(reason)
    if not tiny_models.is_present(family):
        pytest.skip(f"{family} is not in this Transformers")
    found = cell("cuda", family, name, "sdpa")
    assert not found["wrong"]
    if found["refused"]:
        pytest.skip(str(found["refused"]))


def test_one_synchronisation_per_forward_and_none_with_lengths():
    batch = lengthy(50, 130, 1, 77)
    del batch["labels"]
    model = llama()
    with fa2patch.apply(model) as patch:
        model(**batch)
        assert "reference" not in {layer.kernel for layer in patch.layers}
        torch.cuda.set_sync_debug_mode("error")
        try:
            model.model(**batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
