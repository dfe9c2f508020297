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


class Process:
    """A process of the pool, which computes a task in the seconds that an H200 took."""

    def __init__(self, machine: Machine, kind: tuple[str, bool]) -> None:
        self.machine, self.kind, self.start, self.until = machine, kind, START, 0.0

    def compute(self, task: pool.Task, device: str) -> None:
        self.machine.started.append(task.name)
        self.until = self.machine.time + self.start + TAKES[task.step]
        self.start = 0  # it is there now

    def stop(self, why: str = "") -> None:
        pass


class Machine(pool.Pool):
    """Sixteen processes on a machine that is there for so many seconds."""

    known = store.committed()

    def __init__(self, monkeypatch: Any, folder: Any, gone: float = float("inf")) -> None:
        super().__init__(16, "cuda", {})
        self.folder, self.gone, self.time = folder, gone, 0.0
        self.started: list[str] = []
        self.done: dict[str, float] = {}  # when
        self.key = keys.Sources(store.ROOT).key({"files": ["fa2patch/__init__.py"], "functions": []})
        here = program.Machine("cuda", "5.17.0", KERNELS, True, dict.fromkeys(OVERLAYS, folder))
        monkeypatch.setattr(program_main, "machine", lambda *unused: here)
        monkeypatch.setattr(pool, "Pool", lambda *unused: self)
        monkeypatch.setattr(pool, "_Worker", lambda kind, *unused: Process(self, kind))

    def run(self, *more: str) -> int:
        # -1 stands for a machine that is gone
        try:
            return program_main.main(["--out", str(self.folder), *more])
        except Gone:
            return -1

    def now(self) -> float:  # type: ignore[override]
        return self.time

    def next(self, until: float) -> tuple[pool.Task, pool.Found] | None:
        process: Any = min(self.busy, key=lambda each: each.until)
        if min(process.until, until) >= self.gone:
            raise Gone
        self.time = min(process.until, until)
        if process.until > until:
            return None
        task = self.busy.pop(process)
        self.idle.append(process)
        self.done[task.name] = self.time
        return task, self.found(task)

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
