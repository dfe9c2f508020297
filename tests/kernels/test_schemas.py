"""The calls of torch's operators fit the operators' schemas in every version of torch, without these versions."""

import json
from types import SimpleNamespace

import aten_schemas
import pytest
import torch

from compat_matrix.bench import operators
from compat_matrix.check.kernel_cases import documents, states, with_gradients
from fa2patch.kernels import Options, asked_by, aten, protocol
from fa2patch.kernels.aten import Efficient, TorchVarlen

SCHEMAS = json.loads(aten_schemas.SCHEMAS.read_text(encoding="utf-8"))
VERSIONS = sorted({v for versions in SCHEMAS.values() for v in versions}, key=lambda v: [*map(int, v.split("."))])
LENGTHS = (4, 6, 1)
PLAIN = {"Tensor": torch.Tensor, "int": int, "SymInt": int, "float": float, "bool": bool}


def schemas_of(version):
    parsed = [torch._C.parse_schema(text) for text, versions in SCHEMAS.items() if version in versions]
    return {schema.name.removeprefix("aten::"): schema for schema in parsed}


def fits(kind, value):
    # ``kind`` is a type as ``SymInt?``.
    return (value is None and kind.endswith("?")) or isinstance(value, PLAIN[kind.rstrip("?")])


def bind(schema, args, kwargs):
    positional = [argument for argument in schema.arguments if not argument.kwarg_only]
    assert len(args) <= len(positional), f"{len(args)} positional arguments, {schema}"
    bound = dict(zip((argument.name for argument in positional), args))
    assert not set(bound) & set(kwargs), "an argument came twice"
    bound.update(kwargs)
    kinds = {argument.name: str(argument.real_type) for argument in schema.arguments}
    assert set(bound) <= set(kinds), f"{set(bound) - set(kinds)} is no argument of {schema}"
    missing = [a.name for a in schema.arguments if a.name not in bound and not a.has_default_value()]
    assert not missing, f"no {missing}, {schema}"
    wrong = {name: value for name, value in bound.items() if not fits(optional(kinds[name]), value)}
    assert not wrong, f"{wrong} in {schema}"
    return bound


def optional(kind):
    # ``Optional[int]`` is ``int?`` in a schema.
    return kind.removeprefix("Optional[").removesuffix("]") + "?" if kind.startswith("Optional[") else kind


@pytest.fixture
def in_version(monkeypatch):

    def put(version):
        calls, schemas = {}, schemas_of(version)

        def operator(name):
            def call(*args, **kwargs):
                bound = calls[name] = bind(schemas[name], args, kwargs)
                q, k, v = (bound[of] for of in ("query", "key", "value"))
                if "backward" in name:
                    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
                lse = q.new_zeros(q.shape[1], q.shape[0])
                return torch.zeros_like(q), lse, *(torch.zeros(2, dtype=torch.int64) for _ in schemas[name].returns[2:])

            call._schema = schemas[name]
            return SimpleNamespace(default=call)

        for name in schemas:
            monkeypatch.setattr(torch.ops.aten, name, operator(name))
        aten.arguments_of.cache_clear()
        monkeypatch.setattr(aten, "_flash_runs", lambda: (True, ""))
        monkeypatch.setattr(aten, "_efficient_runs", aten._efficient_runs.__wrapped__)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(protocol, "capability", lambda: (8, 0))
        return calls

    yield put
    aten.arguments_of.cache_clear()


def supported(kernel, options, trees=False):
    # The layer is one in bfloat16 on a CUDA device. Its support is read from the schemas.
    asked = asked_by(*(x.bfloat16() for x in states(LENGTHS)), options, trees)
    return kernel.available()[0] and kernel.supports(asked._replace(device="cuda"))[0]


def test_every_version_has_every_operator():
    assert len(VERSIONS) >= 15
    for version in VERSIONS:
        assert set(schemas_of(version)) == set(operators.OPERATORS)


@pytest.mark.parametrize("trees", [False, True], ids=["documents", "trees"])
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("version", VERSIONS)
def test_torch_varlen_calls_what_the_version_has(in_version, version, window, sinks, trees):
    calls = in_version(version)
    q, k, v = states(LENGTHS, groups=2)
    logits = torch.zeros(q.shape[1], dtype=q.dtype, requires_grad=True) if sinks else None
    options = Options(window=window, sinks=logits)
    has_windows = "window_size_left" in aten.arguments_of("_flash_attention_forward")
    assert supported(TorchVarlen(), options, trees) == (has_windows or not (window or sinks))
    if not supported(TorchVarlen(), options, trees):
        return
    boundaries = documents(LENGTHS)
    if trees:
        boundaries.parents = torch.tensor([-1, 0, 0], dtype=torch.int32)
    backward = sinks or (trees and window is None)  # else the derivative is torch's own
    with torch.set_grad_enabled(backward):
        call = lambda: TorchVarlen()(q, k, v, boundaries, options)  # noqa: E731
        with_gradients(call, [x for x in (q, k, v, logits) if x is not None]) if backward else call()
    assert set(calls) == {"_flash_attention_forward", *(["_flash_attention_backward"] if backward else [])}
    for bound in calls.values():
        assert bound["scale"] == q.shape[-1] ** -0.5
        assert (bound.get("window_size_left"), bound.get("window_size_right")) == ((2, 0) if window else (None, None))


@pytest.mark.parametrize("version", VERSIONS)
def test_efficient_calls_what_the_version_has(in_version, version):
    calls = in_version(version)
    both = "max_seqlen_k" in {
        argument.name for argument in schemas_of(version)["_efficient_attention_forward"].arguments
    }
    assert supported(Efficient(), Options()) == both
    if both:
        with torch.no_grad():
            Efficient()(*states(LENGTHS, groups=2), documents(LENGTHS), Options())
        (bound,) = calls.values()
        assert bound["max_seqlen_q"] == bound["max_seqlen_k"] == max(LENGTHS)
        assert bound["custom_mask_type"] == 1 and bound["compute_log_sumexp"] is True


def test_a_schema_stays_for_the_versions_that_are_not_read_again():
    known = aten_schemas.with_version({}, "2.9.1", ["aten::f(int a) -> int"])
    known = aten_schemas.with_version(known, "2.10.0", ["aten::f(int a) -> int"])
    assert known == {"aten::f(int a) -> int": ["2.9.1", "2.10.0"]}
    changed = aten_schemas.with_version(known, "2.10.0", ["aten::f(int a, int b) -> int"])
    assert changed == {"aten::f(int a) -> int": ["2.9.1"], "aten::f(int a, int b) -> int": ["2.10.0"]}


def test_the_file_has_the_schemas_of_this_torch():
    minor = torch.__version__.split(".")[:2]
    known = [version for version in VERSIONS if version.split(".")[:2] == minor]
    assert known, "run tests/helpers/aten_schemas.py with this torch"
    (version,) = known
    for name, schema in schemas_of(version).items():
        assert str(schema) == str(getattr(torch.ops.aten, name).default._schema)
