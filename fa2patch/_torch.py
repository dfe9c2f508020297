"""What differs between versions of torch: torch.compile, autocast, and forwards inside a forward that runs.

No question about the compiler imports it, because that takes a second. The kernel that calls an operator looks at how
the operator's arguments differ between versions.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import itertools
import random
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Callable, TypeVar, cast

import numpy
import torch
from torch.utils._python_dispatch import _disable_current_modes

F = TypeVar("F", bound=Callable[..., Any])

# From torch 2.4 on, custom operators keep a graph whole. Before, the graph breaks at each of them.
HAS_OPERATORS = hasattr(torch.library, "custom_op")

# Inside torch's `context_parallel`, another function stands under its name in `torch.nn.functional`.
SDPA = torch._C._nn.scaled_dot_product_attention

_later: dict[str, Callable[[], None]] = {}
_unfinished: set[str] = set()
_defining = threading.RLock()  # defining an operator asks the namespace for it


class _Operators(torch._ops._OpNamespace):
    # This is `torch.ops.fa2patch`, which defines an operator when it is first read: a definition takes milliseconds,
    # and torch's first one looks at the files of all modules. Only AOTInductor's packages look operators up in C++, so
    # `torch.ops.fa2patch.NAME` must be read before one is loaded.

    # part of the name by which graphs in torch's cache know an operator
    __module__ = torch._ops._OpNamespace.__module__

    def __getattr__(self, name: str) -> Any:
        with _defining:
            if name in _later:
                _unfinished.add(name)
                try:
                    _later.pop(name)()
                finally:
                    _unfinished.discard(name)
            if name in self.__dict__:  # the definition, or another thread, has asked for it meanwhile
                return self.__dict__[name]
            return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        # torch keeps an operator here while it is being defined, where another thread would find it without kernels.
        if name not in _unfinished:
            super().__setattr__(name, value)


def operator_later(
    name: str,
    function: Callable[..., Any],  # must not change its arguments
    schema: str,  # written out, because torch 2.4 cannot infer it from annotations that are strings
    fake: Callable[..., Any],
    gradients: Callable[..., Any] | None = None,
    save: Callable[..., None] | None = None,
) -> None:
    def define() -> None:
        operator = torch.library.custom_op(f"fa2patch::{name}", function, mutates_args=(), schema=schema)
        operator.register_fake(fake)
        if gradients is not None:
            operator.register_autograd(gradients, setup_context=save)

    _later[name] = define


if HAS_OPERATORS:
    torch.ops.fa2patch = _Operators("fa2patch")  # type: ignore[attr-defined]


def uncompiled(function: F) -> F:
    # Values that the function reads on the host must not become constants of the graph. This is the mark that
    # torch.compiler.disable sets (torch/_dynamo/eval_frame.py).
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def eager(function: F) -> F:
    # Neither the function nor what it calls is compiled, while `uncompiled` lets dynamo look at what it calls. This is
    # torch.compiler.disable, which torch's own decorator loads when the function is first called.
    made: Any = torch._compile._disable_dynamo(function)
    return cast(F, made)


def constant(function: F) -> F:
    # The return value becomes a constant of the graph. This is the mark that torch._dynamo.assume_constant_result sets
    # (torch/_dynamo/decorators.py).
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


_numbers = itertools.count(1)
_numbered: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def number(held: Any) -> str:
    # A `constant` function of a graph looks the object up by this number. A graph that was captured with an older
    # number is captured again. The number is a text, because dynamo may turn an int that differs between models into a
    # symbol of the graph, which such a function cannot take.
    given = str(next(_numbers))
    _numbered[given] = held
    return given


def numbered(given: str) -> Any:
    return _numbered[given]


_paused = False
_CAN_TELL = hasattr(torch.compiler, "is_dynamo_compiling")
_is_traced = torch.compiler.is_dynamo_compiling if _CAN_TELL else bool  # true in code that dynamo traces alone


@contextlib.contextmanager
def paused() -> Iterator[None]:
    # A function that is called during a capture but not captured runs models eagerly inside this block:
    # torch.compiler.is_compiling is True there, although these models are not captured.
    global _paused
    before, _paused = _paused, True
    try:
        yield
    finally:
        _paused = before


def compiling() -> bool:
    # torch.compiler.is_compiling gives the same answer, but asks TorchScript first, and every forward asks several
    # times. Torch before 2.3 cannot tell.
    return _is_traced() or (_CAN_TELL and torch.compiler._is_compiling_flag and not _paused)


_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch


def recording() -> bool:
    # make_fx and aot_function record the operators that run, for a graph that is run again, by a mode of torch's
    # dispatch or of what comes before it (pre-dispatch).
    on = torch._C._len_torch_dispatch_stack() or torch._C._dispatch_tls_is_dispatch_key_included(_PRE_DISPATCH)
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor") if on else None
    named = "get_proxy_mode" if hasattr(proxies, "get_proxy_mode") else "get_innermost_proxy_mode"  # in torch 2.1
    current = getattr(proxies, named, None)
    return current is not None and current() is not None


def transforming() -> bool:
    # The transforms of torch.func (vmap, grad, ...) have a stack of interpreters.
    return torch._C._functorch.peek_interpreter_stack() is not None


def traced(frame: FrameType) -> tuple[CodeType, dict[str, Any]]:
    # Dynamo traces a call in frames of InstructionTranslatorBase.run, because a traced call has no frame of its own.
    # This returns the code that is traced in such a frame, and that code's variables. A variable that is no module,
    # constant or dict stays dynamo's object for it.
    tracer = frame.f_locals["self"]
    return tracer.f_code, {name: _traced_value(tracer, value) for name, value in tracer.symbolic_locals.items()}


def _traced_value(tracer: Any, variable: Any) -> Any:
    lazy = getattr(variable, "_cache", None)
    if lazy is not None and lazy.vt is None:  # dynamo has not looked at it; doing so would add an input to the graph
        return lazy.value
    held = vars(variable if lazy is None else lazy.vt)
    if "pre_existing_contents" in held:  # a cell, of a variable that a closure uses
        try:
            return _traced_value(tracer, tracer.output.side_effects.load_cell(variable))
        except Exception:  # dynamo's own, for a variable that has no value yet
            return variable
    if "module_key" in held:
        return tracer.output.get_submodule(held["module_key"])
    if isinstance(held.get("items"), dict):
        names = {getattr(getattr(key, "vt", key), "value", key): value for key, value in held["items"].items()}
        return {name: _traced_value(tracer, value) for name, value in names.items()}
    return held.get("value", variable)


def unbacked_size(least: int) -> Any:
    # The size depends on values, for an operator's fake implementation. `new_dynamic_size` gives one only
    # with fullgraph=True or dynamo's capture_dynamic_output_shape_ops. Otherwise the graph would break at the operator,
    # although nothing behind it needs the number.
    context = torch.library.get_ctx()
    allocate = getattr(getattr(torch._library, "fake_impl", None), "allocate_size", None)
    shapes = getattr(context, "_shape_env", None)
    if allocate is None or shapes is None:
        return context.new_dynamic_size(min=least)
    return allocate(shapes, least)


def between_compilations(change: Callable[[], None]) -> None:
    # dynamo checks the guards of a new graph at once, and raises an InternalTorchDynamoError if what it has traced was
    # changed since, for example by a finalizer. So a change waits for the end of a compilation in any thread, and
    # another thread may then make it.
    lock = _lock_of_dynamo()
    if lock is None:
        return change()
    # This thread's own compilation would let it in again. A finalizer must not wait, and threading.Thread has locks
    # of its own, which the code that the finalizer has interrupted may hold.
    if lock._is_owned() or not lock.acquire(blocking=False):
        _thread.start_new_thread(_made_with, (lock, change))
        return None
    try:
        return change()
    finally:
        lock.release()


def no_compilation() -> AbstractContextManager[Any]:
    # Another thread's compilation may have traced what is replaced here, and its guards would fail.
    return _lock_of_dynamo() or contextlib.nullcontext()


def _made_with(lock: Any, change: Callable[[], None]) -> None:
    with lock:
        change()


def _lock_of_dynamo() -> Any:
    # The lock is held while a graph is compiled. There is none before the compiler is imported.
    homes = (sys.modules.get(f"torch._dynamo.{name}") for name in ("convert_frame", "eval_frame"))  # the latter in 2.1
    return next((lock for lock in (getattr(home, "compile_lock", None) for home in homes) if lock is not None), None)


_OUT_OF_MEMORY = getattr(torch, "OutOfMemoryError", None) or torch.cuda.OutOfMemoryError  # the former from 2.5 on
_INTERRUPTED = (MemoryError, InterruptedError, _OUT_OF_MEMORY)
# These are messages of CUDA, ROCm, MPS and XPU, of torch's CPU allocator, and of cuBLAS and related libraries. Triton's
# "out of resource: shared memory" is not among them: it depends on the kernel's size, so another try fails as well.
_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "_STATUS_ALLOC_FAILED")


def is_no_verdict(error: BaseException) -> bool:
    # Such an error says nothing about what was tried: memory ran out, or the run was interrupted. The caller must raise
    # it again and must not remember it as a result, because another try may succeed.
    if not isinstance(error, Exception) or isinstance(error, _INTERRUPTED):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    if isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY):
        return True
    return error.__cause__ is not None and is_no_verdict(error.__cause__)


@contextlib.contextmanager
def outside_the_forward(device: torch.device) -> Iterator[None]:
    # The forward that is running has an inference mode, saved-tensor hooks of its checkpoint and modes that watch
    # operators. They do not apply inside, and its random number generators are restored afterwards.
    with contextlib.ExitStack() as stack:
        stack.enter_context(unobserved())
        stack.enter_context(_autocast_entered_once())
        stack.callback(random.setstate, random.getstate())
        stack.callback(numpy.random.set_state, numpy.random.get_state())
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x))
        yield


_torch_functions: Any = torch.overrides


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    # Modes that see each operator (FlopCounterMode) or function do not see what runs inside. Torch's own modes of
    # functions stay, because a default device is one.
    dispatched, called = torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()
    if not (dispatched or called):
        yield
        return
    modes = [_torch_functions._pop_mode() for _ in range(called)][::-1]
    kept = [mode for mode in modes if _is_of_torch(type(mode).__torch_function__)]
    _set_modes(kept)
    try:
        with _disable_current_modes() if dispatched else contextlib.nullcontext():
            yield
    finally:
        for _ in kept:
            _torch_functions._pop_mode()
        _set_modes(modes)


def _set_modes(modes: list[Any]) -> None:
    for mode in modes:
        _torch_functions._push_mode(mode)


def _is_of_torch(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(f"{Path(torch.__file__).parent}/")


@contextlib.contextmanager
def _autocast_entered_once() -> Iterator[None]:
    # accelerate decorates `forward` with one torch.autocast object, which only its decorator's frame holds. The object
    # notes on entry what to restore. A forward that runs within itself would note that autocast was on before, and
    # autocast would stay on for good.
    held = (value for frame, _ in traceback.walk_stack(None) for value in list(frame.f_locals.values()))
    noted = [
        (one, dict(vars(one)))
        for one in {id(value): value for value in held}.values()
        if issubclass(type(one), torch.autocast)
    ]
    try:
        yield
    finally:
        for one, state in noted:
            vars(one).clear()
            vars(one).update(state)


@contextlib.contextmanager
def autocast_uncached() -> Iterator[None]:
    # Autocast keeps the casts of weights for all forwards in its context. A cast that was made here has no gradient,
    # and the caller's forward would use it.
    kept = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(kept)


def eagerly() -> AbstractContextManager[None]:
    stance = getattr(torch.compiler, "set_stance", None)  # torch 2.6 on
    return contextlib.nullcontext() if stance is None else stance("force_eager")


@contextlib.contextmanager
def without_gradients() -> Iterator[None]:
    with autocast_uncached(), torch.no_grad():
        yield


def computed_in(states: torch.Tensor) -> torch.dtype:
    # Autocast may change the dtype of products with these states. An empty product shows it.
    return torch.nn.functional.linear(states.new_empty(0, 1), states.new_empty(1, 1)).dtype


def autocast_dtype(states: torch.Tensor) -> torch.dtype | None:
    # every layer asks, and a device makes the name of its type anew each time
    device = "cpu" if states.is_cpu else "cuda" if states.is_cuda else states.device.type
    if _AUTOCAST_BY_DEVICE:
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    if device == "cpu":  # before torch 2.4 the functions take no device, and mean the GPU
        return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
    return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None


_AUTOCAST_BY_DEVICE = hasattr(torch, "get_autocast_dtype")
