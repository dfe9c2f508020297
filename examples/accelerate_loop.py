"""Your own training loop with accelerate, without padding.

python accelerate_loop.py --model NAME --data FILE.jsonl     (or: accelerate launch accelerate_loop.py ...)
"""

from __future__ import annotations

from itertools import count, islice

import small
import torch
from torch.utils.data import DataLoader

import fa2patch

try:
    from accelerate import Accelerator
except ImportError as error:
    raise SystemExit(f"{error}. This example needs accelerate: pip install accelerate") from None


def main(argv: list[str] | None = None) -> list[float]:
    """Train and return the loss of every step."""
    options = small.options(__doc__, argv)
    texts = small.texts(options)
    model, tokenizer = small.load(options, texts)

    fa2patch.apply(model)
    collate = fa2patch.DataCollatorWithFlattening(return_flash_attn_kwargs=True)  # lengths avoid reads from the GPU

    accelerator = Accelerator()
    loader = DataLoader(small.tokenized(texts, tokenizer), batch_size=8, shuffle=True, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5 if options.model else 2e-3)
    model, optimizer, loader = accelerator.prepare(model.train(), optimizer, loader)

    losses = []
    for batch in islice((batch for _ in count() for batch in loader), options.steps):
        loss = model(**batch, use_cache=False).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        accelerator.print(f"step {len(losses)}: loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
