"""Questions about functions and classes: their signatures, and what their code objects say.

Code that cannot be read (a C function, a ``partialmethod``) answers every yes-or-no question with no. What builds on
``own_code`` looks at a function itself, and all else looks below the decorators that keep ``__wrapped__``.
"""

from __future__ import annotations

import dis
import functools
import importlib.util
import inspect
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any

import torch

from .._torch import traced, uncompiled
from .._types import Call, Config, Function
from .transformers_names import CALLS_FLASH


def code_of(function: object) -> CodeType | None:
    if hasattr(function, "__wrapped__") and callable(function):
        function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) else None


def own_code(function: object) -> CodeType | None:
    # of the outermost decorator, if there is any
    return getattr(function, "__code__", None)


def is_scripted(module: object) -> bool:
    # Torch runs TorchScript by itself, and its hooks and forward cannot be changed.
    return isinstance(module, torch.jit.ScriptModule)


@functools.cache
def functions_defined(module: str) -> tuple[str, ...]:
    # what the code of its file defines at its top level
    spec = importlib.util.find_spec(module)
    code_of_file = getattr(getattr(spec, "loader", None), "get_code", lambda name: None)
    code = code_of_file(module)
    constants = () if code is None else code.co_consts
    return tuple(one.co_name for one in constants if isinstance(one, CodeType) and one.co_flags & inspect.CO_NEWLOCALS)


def plain(function: Any) -> Any:
    """The function below partials and bound methods."""
    while True:
        inside = function.func if isinstance(function, functools.partial) else getattr(function, "__func__", None)
        if inside is None:
            return function
        function = inside


def code_called(function: object) -> CodeType | None:
    # An object is called through the __call__ of its class.
    function = plain(function)
    return own_code(function) or own_code(getattr(type(function), "__call__", None))  # noqa: B004


# names of torch's functions and methods that draw random numbers
DRAWS = frozenset((
    "bernoulli", "bernoulli_", "cauchy_", "dropout", "exponential_", "log_normal_", "multinomial", "normal", "normal_",
    "poisson", "rand", "rand_like", "randint", "randn", "randn_like", "random_", "rsample", "sample", "trunc_normal_",
    "uniform_",
))  # fmt: skip


def draws(function: object) -> bool:
    # Functions that this one wraps, holds or calls by name count too. Those of torch are not looked into.
    seen: set[CodeType] = set()
    waiting = [function]
    while waiting:
        one = plain(inspect.unwrap(waiting.pop()))  # type: ignore[arg-type]
        code = code_called(one)
        if code is None or code in seen or getattr(one, "__module__", "").partition(".")[0] == "torch":
            continue
        seen.add(code)
        names = names_within(one)
        if names & DRAWS:
            return True
        called = getattr(one, "__globals__", {})
        waiting += [value for value in enclosed(one).values() if callable(value)]
        waiting += [called[name] for name in names if isinstance(called.get(name), FunctionType)]
    return False


def names_within(function: object) -> frozenset[str]:
    """The global names and attributes that a function's code uses, and that of functions that are defined in it."""
    return frozenset(name for code in _with_nested(code_called(function)) for name in code.co_names)


def words_within(function: object) -> frozenset[str]:
    # Texts count too, because `getattr` finds an attribute by a text.
    constants = (value for code in _with_nested(code_called(function)) for value in code.co_consts)
    return names_within(function).union(value for value in constants if isinstance(value, str))


def _with_nested(code: object) -> Iterator[CodeType]:
    if isinstance(code, CodeType):
        yield code
        for value in code.co_consts:
            yield from _with_nested(value)


def enclosed(function: object) -> dict[str, object]:
    # A variable that is still to come has an empty cell.
    names, cells = getattr(own_code(function), "co_freevars", ()), getattr(function, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells) if cell != CellType()}


def names_read(function: object) -> tuple[str, ...]:
    # global names and attributes, in the order of their first use
    return getattr(code_of(function), "co_names", ())


def reads_name(function: object, name: str) -> bool:
    return name in names_read(function)


def casts_states(function: object) -> bool:
    # Transformers' flash path casts float32 states.
    return reads_name(function, CALLS_FLASH)


def has_constant(function: object, value: object) -> bool:
    return value in getattr(code_of(function), "co_consts", ())


def hands_on(function: object, name: str) -> bool:
    # as a keyword of a call, whose names are a tuple among the constants
    constants = getattr(code_of(function), "co_consts", ())
    return any(isinstance(value, tuple) and name in value for value in constants)


def has_variable(function: object, name: str) -> bool:
    return name in variables_of(function)


def variables_of(function: object) -> frozenset[str]:
    return frozenset(getattr(code_of(function), "co_varnames", ()))


def methods_called(method: object) -> list[str]:
    # The result is in the order of the code.
    itself = getattr(code_of(method), "co_varnames", ())[:1]  # functions inside it may use it, too
    instructions = _instructions(method)
    return [
        str(then.argval)
        for load, then in zip(instructions, instructions[1:])
        if load.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) and load.argval in itself and _looks_up_a_method(then)
    ]


def reads_of(function: object, attribute: str, name: str) -> bool:
    # Both x.attribute.name and getattr(x.attribute, name) are found, of any x.
    read = [each.argval for each in _instructions(function)]
    return (attribute, name) in zip(read, read[1:])


def multiplies_matrices(function: object) -> bool:
    code = code_of(function)
    return code is not None and _multiplies_matrices(code)


@functools.lru_cache(maxsize=1024)  # ``apply`` asks it of every class with a mask, and to read a code takes 3 ms
def _multiplies_matrices(code: CodeType) -> bool:
    instructions = dis.get_instructions(code)
    return any(each.opname == "BINARY_MATRIX_MULTIPLY" or each.argrepr in ("@", "@=") for each in instructions)


def stored(method: object, attribute: str) -> set[object]:
    # `...` stands for a value that is no constant.
    instructions = _instructions(method)
    return {
        value.argval if value.opname == "LOAD_CONST" else ...
        for value, _, then in zip(instructions, instructions[1:], instructions[2:])
        if then.opname == "STORE_ATTR" and then.argval == attribute
    }


def sets(function: object, name: str, within: bool = False) -> bool:
    """Whether a function assigns a local variable or, with ``within``, parts of it."""
    code = _instructions(function)
    if not within:
        return any(each.opname == "STORE_FAST" and each.argval == name for each in code)
    return any(
        each.opname == "STORE_SUBSCR" and any(before.argval == name for before in code[max(at - 8, 0) : at])
        for at, each in enumerate(code)
    )


def _instructions(function: object) -> list[dis.Instruction]:
    code = code_of(function)
    return [] if code is None else list(dis.get_instructions(code))


def _looks_up_a_method(instruction: dis.Instruction) -> bool:
    # Since Python 3.12, the lowest bit of LOAD_ATTR says that a method is loaded.
    if sys.version_info >= (3, 12):
        return instruction.opname == "LOAD_ATTR" and bool((instruction.arg or 0) & 1)
    return instruction.opname == "LOAD_METHOD"


def parameters(function: Function) -> list[inspect.Parameter]:
    # as callers see them, with `self` if the function is not bound; TypeError or ValueError without a signature
    if not isinstance(function, FunctionType) or "__signature__" in vars(function):
        return list(inspect.signature(function).parameters.values())
    if function not in _parameters:
        _parameters[function] = tuple(inspect.signature(function).parameters.values())
    return list(_parameters[function])


# `apply` asks for the parameters of the same functions a hundred times
_parameters: weakref.WeakKeyDictionary[Function, tuple[inspect.Parameter, ...]] = weakref.WeakKeyDictionary()


def parameter_names(function: Function) -> list[str]:
    return [parameter.name for parameter in parameters(function)]


def upstream_parameters(function: Function) -> set[str]:
    # of the innermost function, below our replacement and other decorators
    return set(parameter_names(inspect.unwrap(function)))


def takes(function: Function, name: str) -> bool:
    return name in _readable_parameters(function)


def default_of(function: Function, name: str, otherwise: Any) -> Any:
    found = _readable_parameters(function).get(name)
    return otherwise if found is None or found.default is found.empty else found.default


def takes_any_keyword(function: Function) -> bool:
    return any(each.kind is each.VAR_KEYWORD for each in _readable_parameters(function).values())


def takes_any_position(function: Function) -> bool:
    return any(each.kind is each.VAR_POSITIONAL for each in _readable_parameters(function).values())


def accepted(function: Function, names: Iterable[str]) -> list[str]:
    taken, any_name = _readable_parameters(function), takes_any_keyword(function)
    return [name for name in names if any_name or name in taken]


def _readable_parameters(function: Function) -> dict[str, inspect.Parameter]:
    try:
        return {each.name: each for each in parameters(function)}
    except (TypeError, ValueError):
        return {}


def show_parameters(function: Function, shown: Iterable[inspect.Parameter]) -> None:
    """Give a function a signature with these parameters, for code that inspects it."""
    signature = inspect.signature(function).replace(parameters=list(shown))
    setattr(function, "__signature__", signature)  # noqa: B010 (mypy does not know the attribute)


def is_of_torch(cls: type) -> bool:
    # Modules of torch work token by token, or are recognised by their class.
    return cls.__module__.startswith("torch.")


def defining(cls: type, attribute: str) -> type:
    return next(base for base in cls.__mro__ if attribute in vars(base))


def forward_of(cls: type) -> Any:
    # as the class that defines it holds it, before it is bound
    return vars(defining(cls, "forward"))["forward"]


def forwards(cls: type) -> Iterator[tuple[type, Function]]:
    for base in cls.__mro__:
        forward = vars(base).get("forward")
        if forward is not None and not is_of_torch(base):
            yield base, forward


def forwards_that_run(cls: type) -> Iterator[Function]:
    """Yield a class's ``forward``, then the inherited ones that it reaches through ``super().forward``."""
    for base in cls.__mro__:
        forward = vars(base).get("forward")
        if forward is not None and code_of(forward) is not None:
            yield forward
            if not reads_name(forward, "forward"):
                return


def uses_flash(config: object) -> bool:
    # The config says how dense batches are computed.
    return "flash" in str(getattr(config, "_attn_implementation", ""))


def text_config(config: Config) -> Config:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def with_keywords(code: CodeType, variables: Mapping[str, Any]) -> Call:
    """The variables of a call of this code, and what its ``**kwargs`` hold."""
    if not code.co_flags & inspect.CO_VARKEYWORDS:
        return dict(variables)
    at = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    keywords = variables.get(code.co_varnames[at])
    return {**variables, **(keywords if isinstance(keywords, dict) else {})}


@uncompiled  # behind a graph break, dynamo would trace the walk over frames
def modules_called() -> list[tuple[Any, CodeType, Mapping[str, Any]]]:
    """The modules whose calls are running in this thread, the innermost first, with the code and its variables."""
    # While a graph is captured, the calls that are traced are among them. Reading the variables of a frame takes time,
    # so only those of a module's call and of functions that are defined as `forward` are read.
    found: list[tuple[Any, CodeType, Mapping[str, Any]]] = []
    dynamo = sys.modules.get("torch._dynamo.symbolic_convert")
    tracing = None if dynamo is None else dynamo.InstructionTranslatorBase.run.__code__  # see traced
    call = torch.nn.Module._call_impl.__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:  # no call of Python's for a frame: every packed batch asks
        code, variables = frame.f_code, None
        if code is tracing:
            code, variables = traced(frame)
        if code is call or (code.co_name == "forward" and code.co_argcount > 0):
            variables = frame.f_locals if variables is None else variables
            found.append((variables.get(code.co_varnames[0]), code, variables))
        frame = frame.f_back
    return found
