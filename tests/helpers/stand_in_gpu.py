"""A stand-in for a machine with a GPU, on which the program is rehearsed: its clock moves only when a task is done.

Tasks take the seconds that an H200 took, and find what it found. The machine may be gone in the middle of some.
"""

from __future__ import annotations

from typing import Any

from compat_matrix import environments, keys
from compat_matrix.gpu import __main__ as program_main
from compat_matrix.gpu import page, pool, program, store

KERNELS = ["flash_attn", "torch_varlen", "efficient", "flex"]
# Seconds until a process computes, and of a task by its step
START = 8
TAKES = {"matrix": 2, "families": 2, "beyond": 2, "kernels": 5, "training": 45, "cuda": 30, "rivals": 30, "tests": 60}
OVERLAYS = (environments.newest().name, *program.RELEASES)


class Gone(BaseException):
    pass


class Machine:
    """A pool of sixteen processes, as the program asks for, which is there for so many seconds."""

    known = store.committed()

    def __init__(self, monkeypatch: Any, folder: Any, gone: float = float("inf")) -> None:
        self.folder, self.gone, self.time = folder, gone, 0.0
        self.busy: dict[pool.Task, float] = {}  # when it is done
        self.idle: list[str] = []  # the releases of processes that wait
        self.started: list[str] = []
        self.done: dict[str, float] = {}  # when
        self.key = keys.Sources(store.ROOT).key({"files": ["fa2patch/__init__.py"], "functions": []})
        here = program.Machine("cuda", "5.17.0", KERNELS, True, dict.fromkeys(OVERLAYS, folder))
        monkeypatch.setattr(program_main, "machine", lambda *unused: here)
        monkeypatch.setattr(pool, "Pool", lambda *unused: self)

    def run(self, *more: str) -> int:
        # -1 stands for a machine that is gone
        try:
            return program_main.main(["--out", str(self.folder), *more])
        except Gone:
            return -1

    def now(self) -> float:
        return self.time

    def is_free(self, task: pool.Task) -> bool:
        alone = task.alone or any(other.alone for other in self.busy)
        return len(self.busy) < (1 if alone else 16)

    def start(self, task: pool.Task) -> None:
        is_there = task.release in self.idle
        if is_there:
            self.idle.remove(task.release)
        self.started.append(task.name)
        self.busy[task] = self.time + TAKES[task.step] + START * (not is_there)

    def next(self, until: float) -> tuple[pool.Task, pool.Found] | None:
        task = min(self.busy, key=lambda each: self.busy[each])
        if min(self.busy[task], until) >= self.gone:
            raise Gone
        if self.busy[task] > until:
            self.time = until
            return None
        self.time = self.busy.pop(task)
        self.idle.append(task.release)
        self.done[task.name] = self.time
        return task, self.found(task)

    def close(self) -> None:
        self.busy.clear()

    def found(self, task: pool.Task) -> pool.Found:
        made = {**self.known["kernels: flash_attn"]["made"], "key": self.key}
        if task.call == "training:train":
            like = "training: Llama-2-7B, checkpointing, 16 documents, "
            variant = task.arguments[1] if like + task.arguments[1] in self.known else "fa2patch:flash_attn+lengths"
            return {"rows": self.known[like + variant]["rows"], "made": made}
        row: dict[str, Any] = {"right": "2 of 2"}
        if task.call == "models:cell":
            row |= {"architecture": task.arguments[0], "kernels": "flash_attn"}
        return {"row": row, "wrong": {}, "refused": {}, "made": made}


def of_page(folder: Any) -> tuple[str, store.Records]:
    return (folder / "gpu.md").read_text(encoding="utf-8"), store.Run(folder).records


STEPS = [*page.WHAT]
