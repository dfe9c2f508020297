"""Patches every model of a program under ``fa2patch run``: as it is made, or when what holds or trains it is made.

``startup/fa2patch_watched.py`` names the classes that are watched, and the kinds. There is one class here, or in a
module beside this one, for each kind.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import wrapt

from .constructed import Constructed
from .made import MadeModels
from .meeting import Meeting
from .saying import say
from .start import Options
from .startup.fa2patch_watched import WATCHED
from .trainers import Trainers

_hook: Hook | None = None


def on(options: Options) -> Hook:
    """Patch the models that this process makes from now on. A hook that is already on is switched off first."""
    global _hook
    off()
    _hook = Hook(options)
    for name in WATCHED:
        wrapt.register_post_import_hook(_hook.watch, name)
    return _hook


def imported(module: Any) -> None:
    """Handle the import of a watched module in a process that ``fa2patch run`` has started."""
    global _hook
    if _hook is None:
        _hook = Hook(Options.inherited())
    _hook.watch(module)


def off() -> None:
    """Switch the hook off, if there is one. It cannot be switched on again."""
    if _hook is not None:
        _hook.off()


class Hook:
    """What is replaced in this process when the watched modules are imported."""

    def __init__(self, options: Options) -> None:
        self._meeting = Meeting(options)
        self._models, self._trainers = MadeModels(self._meeting), Trainers(self._meeting)

    def watch(self, module: ModuleType) -> None:
        """Replace methods of the class for which a module is watched."""
        kind, _, name = WATCHED[module.__name__].partition(":")
        cls = getattr(module, name, None)
        if not self._meeting.active or cls is None:  # newer releases keep the module of an older one for its name only
            return
        if kind == "models":
            self._models.watch(cls)
        elif kind == "trainers":
            self._trainers.watch(cls)
        else:
            self._models.inside.append(Constructed(cls, self._constructed, self._meeting))

    def _constructed(self, holder: Any, outermost: bool) -> None:
        if self._meeting.active and outermost:
            self._meeting.meet_in(holder)

    def off(self) -> None:
        """Undo the replacements and revert all patches. The hook cannot be switched on again."""
        if not self._meeting.active:
            return
        self._meeting.end()
        if self._meeting.options.collate and self._meeting.patched and not self._trainers.trained:
            say(
                "--collate has changed nothing: no Trainer has trained here, and a loop of one's own may look at rows "
                "and masks. There, give the loader fa2patch.DataCollatorWithFlattening()."
            )
