"""Train and test a LightningModule, padded without fa2patch and packed: ``lightning_steps.py PACKAGE``.

PACKAGE is ``lightning.pytorch`` or ``pytorch_lightning``. Prints a JSON object with an entry for each run: the losses
of training and of the test, the number of tokens that the first layer computed in each call of the model, those of each
pass, and the names of the patched models.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import torch
from model_init import documents, make_model, padded

pl = importlib.import_module(sys.argv[1])
STEPS = 8
RUNS = {
    "padded": ("init", "padded"),
    "packed": ("init", "packed"),
    "packed, made in setup": ("setup", "packed"),
    "packed, made in configure_model": ("configure_model", "packed"),
    "padded batches": ("init", "padded batches"),
    "passes": ("init", "passes"),
}
# The method that makes the model, and the batches. Nothing of fa2patch is imported before the first run.
BUDGET = 40


class Module(pl.LightningModule):  # type: ignore[misc,name-defined]
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.found: list[float] = []
        self.tokens: list[int] = []
        self.runs: list[int] = []
        self.passes: list[int] = []
        if self.where == "init":
            self.make()

    def make(self) -> None:
        torch.manual_seed(0)
        self.net = torch.nn.ModuleDict({"llm": make_model()})
        layer = self.net["llm"].model.layers[0]
        layer.register_forward_pre_hook(self.count, with_kwargs=True)

    def count(self, layer: Any, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        self.runs.append(hidden[..., 0].numel())

    def computed(self, batch: dict[str, Any]) -> torch.Tensor:
        # The hook is code that fa2patch tries, so the layer may run several times in a call.
        self.runs.clear()
        loss: torch.Tensor = self.net["llm"](**batch, use_cache=False).loss
        self.tokens.append(max(self.runs))
        return loss

    def setup(self, stage: str) -> None:
        if self.where == "setup" and not hasattr(self, "net"):
            self.make()

    def configure_model(self) -> None:
        if self.where == "configure_model" and not hasattr(self, "net"):
            self.make()

    if pl.__version__ < "2.1":
        configure_sharded_model = configure_model  # its name up to 2.0

    def loss(self, batch: dict[str, Any]) -> torch.Tensor:
        loss = self.computed(batch)
        self.found.append(loss.item())
        return loss

    def training_step(self, batch: dict[str, Any], number: int) -> torch.Tensor:
        return self.loss(batch)

    def test_step(self, batch: dict[str, Any], number: int) -> None:
        self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class InPasses(Module):
    # The module steps by itself, in passes of a budget.

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Any], number: int) -> None:
        from fa2patch.packing import passes

        parts, loss, optimizer = passes(batch, BUDGET), 0.0, self.optimizers()
        optimizer.zero_grad()
        for part, share in zip(parts, parts.shares):
            each = self.computed(part) * share
            self.manual_backward(each)
            loss += each.item()
        optimizer.step()
        self.passes += parts.tokens.tolist()
        self.found.append(loss)


def run(where: str, how: str) -> dict[str, Any]:
    collate, callbacks = padded, []
    if how != "padded":
        import fa2patch

        callbacks = [fa2patch.LightningCallback(padded_batches=how == "padded batches" or None)]
        collate = fa2patch.DataCollatorWithFlattening() if how in ("packed", "passes") else padded  # type: ignore[assignment]
    loader = torch.utils.data.DataLoader(documents(4 * STEPS), batch_size=4, collate_fn=collate)  # type: ignore[arg-type]
    module = InPasses(where) if how == "passes" else Module(where)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False, callbacks=callbacks[:],
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader)
    trained = len(module.found)
    trainer.test(module, loader, verbose=False)
    return {
        "losses": module.found[:trained], "test": module.found[trained:], "tokens": module.tokens,
        "passes": module.passes,
        "patched": [name for callback in callbacks for name in callback.patches],
    }  # fmt: skip


if __name__ == "__main__":
    found = {name: run(*options) for name, options in RUNS.items()}
    print(json.dumps({"version": pl.__version__, **found}))
