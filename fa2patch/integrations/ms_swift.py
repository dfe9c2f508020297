"""The plugin of ms-swift: ``--external_plugins "$(python -m fa2patch.integrations.ms_swift)"``.

ms-swift takes the path of a file, which this module prints as a program, and imports that file under a name of its own
before it checks its arguments. So imports are absolute here. Read and run with ms-swift 3.10.0 and 4.6.0.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, Callable

# These are the modules of training arguments in ms-swift 4 and 3.
ARGUMENTS = ("swift.arguments.sft_args", "swift.llm.argument.train_args")

CHECK = "_check_padding_free"
# The check accepts this implementation as one that isolates packed rows.
FLASH = "flash_attention_2"


def install() -> None:
    # `--packing` and `--padding_free` pass with any `--attn_impl`.
    from fa2patch.binding import bind

    trainers = importlib.import_module("swift.trainers.mixin")
    arguments = _arguments()
    if not hasattr(getattr(arguments, CHECK), "__wrapped__"):  # a plugin may be named twice
        bind(arguments, CHECK, _lifting, install)  # what is replaced stays so as long as this module
        bind(trainers.SwiftMixin, "__init__", _patching, install)


def _arguments() -> Any:
    # Either module may hold the class of training arguments that has the check.
    from fa2patch.errors import CannotRun

    for name in ARGUMENTS:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        for cls in vars(module).values():
            if isinstance(cls, type) and CHECK in vars(cls):
                return cls
    raise CannotRun(
        f"expected the class with {CHECK} in {' or '.join(ARGUMENTS)}, found none: this release of ms-swift was not "
        "read. Start it with fa2patch run swift sft ..., and with --attn_impl flash_attention_2."
    )


def _lifting(original: Callable[[Any], None]) -> Callable[[Any], None]:
    # The check runs as if the attention were flash attention. It sets padding_free for --packing, too.

    @functools.wraps(original)
    def check(self: Any) -> None:
        given, self.attn_impl = self.attn_impl, FLASH
        try:
            original(self)
        finally:
            self.attn_impl = given

    return check


def _patching(original: Callable[..., None]) -> Callable[..., None]:
    # The models are patched before the trainer's constructor. A reference model is there already: the trainers of
    # preferences keep it before they call this constructor.

    @functools.wraps(original)
    def __init__(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        from fa2patch.integrations import patched, said_after_a_step

        for each in (model, getattr(self, "ref_model", None)):
            if each is not None:
                patched(each)
        original(self, model, *args, **kwargs)
        said_after_a_step(self)

    return __init__


if __name__ == "__main__":
    print(__file__)
else:
    install()
