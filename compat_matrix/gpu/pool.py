"""Processes that compute tasks: many at a time, or one alone where time and memory are measured."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import commits

ALONE = {"USE_TF": "0", "USE_JAX": "0", "USE_FLAX": "0", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error",
         "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}  # fmt: skip

Found = dict[str, Any]


@dataclass(frozen=True)
class Task:
    step: str
    what: str  # within the step
    call: str  # module:function of this package
    arguments: tuple[str, ...] = ()
    seconds: float = 20  # that it may take; it is stopped after three times as many and the start of a process
    alone: bool = False  # nothing else runs meanwhile
    release: str = ""  # of Transformers, if it is not the installed one

    @property
    def name(self) -> str:
        return f"{self.step}: {self.what}"


START = 90  # seconds that a process may take until it computes


def run(tasks: list[Task], pool: Any, seconds: float, keep: Callable[[Task, Found], None]) -> None:
    """Compute tasks in their order, each as soon as a process is free, and start none that may not end in time."""
    until, waiting = pool.now() + seconds, list(tasks)
    while True:
        while True:
            fitting = next((task for task in waiting if pool.now() + task.seconds <= until), None)
            if fitting is None or not pool.is_free(fitting):
                break
            waiting.remove(fitting)
            pool.start(fitting)
        came = pool.next(until) if pool.busy else None
        if came is None:
            return pool.close()
        keep(*came)


class Pool:
    now = staticmethod(time.monotonic)

    def __init__(self, count: int, device: str, releases: Mapping[str, Path]) -> None:
        self.count, self.device, self.releases = count, device, releases
        self.busy: dict[_Worker, Task] = {}
        self.idle: list[_Worker] = []
        self.came: queue.Queue[tuple[_Worker, Found | None]] = queue.Queue()

    def is_free(self, task: Task) -> bool:
        alone = task.alone or any(other.alone for other in self.busy.values())
        return len(self.busy) < (1 if alone else self.count)

    def start(self, task: Task) -> None:
        # What is timed has a process that computed nothing beside others, and no other one holds memory meanwhile.
        kind = task.release, task.alone
        worker = next((each for each in self.idle if each.kind == kind), None)
        if worker is not None:
            self.idle.remove(worker)
        while self.idle and (task.alone or len(self.idle) + len(self.busy) >= self.count):
            self.idle.pop().stop()
        if worker is None:
            worker = _Worker(kind, self.releases.get(task.release), self.came)
        worker.compute(task, self.device)
        self.busy[worker] = task

    def next(self, until: float) -> tuple[Task, Found] | None:
        """Return the next task that is done, or None when the time is over."""
        while self.now() < until:
            first = min(self.busy, key=lambda worker: worker.until)
            try:
                worker, found = self.came.get(timeout=max(min(first.until, until) - self.now(), 0.01))
            except queue.Empty:
                if self.now() >= first.until:
                    first.stop(f"it took more than {first.until - first.begun:.0f} seconds")
                continue
            if worker not in self.busy:
                continue  # it was idle, and stopped
            task = self.busy.pop(worker)
            found = worker.end() if found is None else found
            if "error" in found:  # which may leave a device, or the process, that computes nothing more
                worker.stop()
            else:
                self.idle.append(worker)
            return task, found
        return None

    def close(self) -> None:
        for worker in (*self.busy, *self.idle):
            worker.stop()


class _Worker:
    def __init__(self, kind: tuple[str, bool], folder: Path | None, came: queue.Queue[Any]) -> None:
        self.kind, self.why, self.until, self.begun = kind, "", 0.0, 0.0
        path = [folder, commits.ROOT, os.environ.get("PYTHONPATH", "")]
        given = {**os.environ, **ALONE, "PYTHONPATH": os.pathsep.join(str(part) for part in path if part)}
        self.errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # it is read when the process ends
        self.process = subprocess.Popen(
            [sys.executable, "-m", "compat_matrix.gpu.work"],
            env=given, cwd=commits.ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
            start_new_session=True,  # so that what it starts is stopped with it
        )  # fmt: skip
        threading.Thread(target=self._read, args=(came,), daemon=True).start()

    def _read(self, came: queue.Queue[Any]) -> None:
        for line in self.process.stdout or ():
            came.put((self, json.loads(line)))
        came.put((self, None))

    def compute(self, task: Task, device: str) -> None:
        self.begun = time.monotonic()
        self.until = self.begun + 3 * task.seconds + START
        told = {"call": task.call, "arguments": task.arguments, "device": device}
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which `next` is told
            print(json.dumps(told), file=self.process.stdin, flush=True)

    def stop(self, why: str = "") -> None:
        self.why = why
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> Found:
        code = self.process.wait()
        self.errors.seek(0)
        last = (self.errors.read().strip() or "it said nothing").splitlines()[-1][:200]
        return {"error": self.why or f"the process ended with {code}: {last}"}
