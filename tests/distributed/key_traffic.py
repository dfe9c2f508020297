"""The bytes of keys and values that torch's engine moves, counted at its collectives beside those on paper."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from engines import Torch
from ranks import of_every_rank
from traffic import heads_of, traffic

import fa2patch
from compat_matrix import split_rows, tiny_models
from compat_matrix.check import rows
from compat_matrix.long_rows import bytes_sent_by_a_layer
from fa2patch.documents.parts import Order
from fa2patch.packing.parts import measured
from fa2patch.upstream.split import balance

TOKENS = 4096  # of a row


def counted(engine: Torch) -> dict[str, dict[str, float]]:
    """Bytes and work of the process that has most of each, for rows of four kinds, in torch's order and in ours."""
    model, found = tiny_models.build("llama", "sdpa", max_position_embeddings=TOKENS).train(), {}
    alone = "head and tail" if engine.balanced else "consecutive"
    for documents in split_rows.DOCUMENTS:
        lengths = _scaled(documents)
        with mock.patch.object(balance, "_order_of", lambda *_: None):
            found[f"{documents}, {alone}"] = _of_one(engine, model, lengths)
        if len(lengths) > 1:
            found[f"{documents}, balanced"] = _of_one(engine, model, lengths)
    return found


def _scaled(documents: str) -> list[int]:
    # a row of split_rows.py on paper, with documents as long beside the row
    ends = np.cumsum(split_rows.row(documents, 0)) * TOKENS // split_rows.TOKENS
    return [length for length in np.diff(ends, prepend=0).tolist() if length]


def _of_one(engine: Torch, model: Any, lengths: list[int]) -> dict[str, float]:
    ids = torch.cat([torch.arange(length) for length in lengths])[None]
    batch = {"input_ids": rows.documents(TOKENS)[0][None], "position_ids": ids, "places": torch.arange(TOKENS)[None]}
    with fa2patch.apply(model), engine.split(batch) as own:
        places = own.pop("places")[0].numpy()
        with traffic() as forward:
            logits = model(**own, use_cache=False).logits
        with traffic() as backward:
            logits.sum().backward()
    parts = of_every_rank((places, forward, backward))
    order = Order(np.concatenate([each[0] for each in parts]), tuple(len(each[0]) for each in parts))
    layers, heads, processes = model.config.num_hidden_layers, heads_of(model.config), dist.get_world_size()
    keys = heads["key_heads"] * (heads["head_dim"] + heads["value_dim"]) * 4
    on_paper, work = measured(lengths, order)
    busiest = int(on_paper.argmax())
    there, back = parts[busiest][1:]
    return {
        "forward": there.received["all_to_all_single"] / layers,
        "backward": back.sent["all_to_all_single"] / layers,
        "on paper": int(on_paper[busiest]) * keys,
        "step": there.received.total() + back.sent.total(),
        "ring": (TOKENS - order.sizes[busiest]) * keys,
        "Ulysses": bytes_sent_by_a_layer(TOKENS / processes, processes, itemsize=4, **heads),
        "work": round(float(work.max() / work.mean()), 2),
    }
