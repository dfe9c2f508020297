"""A stand-in for a machine with a GPU, on which ``first_gpu`` is rehearsed: it replays what an H200 found and took.

Its clock moves only when a process computes. Processes write their files bit by bit, as those on a GPU do, and the
machine may be gone in the middle of one.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from compat_matrix.bench import figures, first_gpu, gpu

KERNELS = ["flash_attn", "torch_varlen", "efficient", "flex"]
VARIANTS = [
    "padded:sdpa", "padded:flash_attention_2", *(f"fa2patch:{name}" for name in KERNELS),
    "fa2patch:flash_attn+lengths", "by-hand:flash_attn", "upstream:flash_attention_2",
    "upstream:flash_attention_2+lengths", "upstream:sdpa",
]  # fmt: skip
# Seconds until a process computes, and that it takes in all: those of an H200 that first_gpu_16_documents.json has.
START, TAKES = 8, {"kernels": 12, "models": 23, "training": 50, "hybrids": 60}


class Gone(BaseException):
    pass


class Machine:
    """A machine that is there for so many seconds."""

    def __init__(self, monkeypatch: Any, folder: Any, seconds: float = float("inf")) -> None:
        self.now, self.gone, self.folder = 0.0, seconds, folder
        self.ran: list[str] = []  # the processes that were started, in order
        self.computed: list[str] = []  # the cases, models and variants that were computed, in order
        self.known = figures.committed("first_gpu_16_documents")
        device = {**figures.header("", "cpu"), "device": self.known["device"]}
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(figures, "header", lambda command, device_type="cpu": {**device, "command": command})
        monkeypatch.setattr(first_gpu, "present_kernels", lambda device_type: KERNELS)
        monkeypatch.setattr(gpu, "variants", lambda device_type, toy: VARIANTS)
        monkeypatch.setattr(gpu, "missing", lambda: {"fa2patch:flash_attn_3": "the package is not installed"})
        monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(gpu.Job, "run", lambda job, seconds: self.run(job, seconds))

    def first_gpu(self) -> int:
        # The command ends with an exit code, or with -1 if the machine is gone.
        try:
            return first_gpu.main(["--out", str(self.folder)])
        except Gone:
            return -1

    def run(self, job: gpu.Job, seconds: float) -> dict[str, Any]:
        # It stands for :meth:`compat_matrix.bench.gpu.Job.run`.
        self.ran.append(f"{job.stage}, {job.name}")
        until, what = self.now + seconds, {"kernels": "cases", "models": "architectures", "hybrids": "families"}
        self.takes(START)
        if job.stage == "training":
            self.takes(TAKES["training"] - START)
            self.computed.append(job.name)
            figures.write(job.result, self.trained(job.name.partition(", ")[2]))
            return {"done": True, "command": job.command}
        parts = self.parts(job)
        header = {"kernel": job.name, "missing": {}, "speed": self.known["results"]["kernels"]["flash_attn"]["speed"]}
        found = figures.read(job.result)[what[job.stage]] if job.result.exists() else {}
        for name in [name for name in parts if name not in found]:
            if self.now > until:
                return {"done": False}
            self.takes((TAKES[job.stage] - START) / len(parts))
            self.computed.append(f"{job.name}, {name}")
            found[name] = parts[name]
            figures.write(job.result, {**header, what[job.stage]: found})
        return {"done": True, "command": job.command}

    def takes(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self.gone:
            raise Gone

    def parts(self, job: gpu.Job) -> dict[str, Any]:
        results = self.known["results"]
        if job.stage == "kernels":
            found: dict[str, Any] = results["kernels"][job.name]["cases"]
        elif job.stage == "models":
            found = results["models"]["5.17.0-flash_attn"]["architectures"]
        else:
            found = {"bamba": {"rows": {"16 x 64": {"packed_ms": 9.0}}}}
        return found

    def trained(self, variant: str) -> dict[str, Any]:
        # What a process of training writes is made of what the merged results say.
        known = self.known["results"]["training"]["training"]["shapes"]["Llama-2-7B"]
        found = {}
        for name, run in known["distributions"].items():
            of, steps = run["variants"].get(variant) or run["variants"]["padded:flash_attention_2"], run["steps"]
            each = run["real_tokens"] / steps
            found[name] = {
                "step_seconds": [each / of["real_tokens_per_second"]] * steps,
                "real_tokens": [each] * steps,
                "padded_tokens": [each * run["limit"]] * steps,
                "losses": [of["last_loss"]] * steps,
                "peak_bytes": of["peak_bytes"],
                "synchronisations": of.get("synchronisations"),
            }
        return {"parameters": known["parameters"], "layers": known["layers"], "distributions": found}
