"""What processes receive, and how equal their work is, where a packed row is split over them: counts on paper.

Keys and values are counted as fa2patch exchanges them: a process receives those that its cut documents lack. Beside
them stand the ways that move all of them, a ring or an all-gather, and Ulysses, which moves queries and outputs, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fa2patch.documents.parts import Order, consecutive, head_and_tail
from fa2patch.packing.parts import balanced, measured

from .diffable import table
from .long_rows import bytes_sent_by_a_layer

TOKENS = 2**17  # of a row
PROCESSES = (2, 4, 8, 16, 64)
ROWS = 8  # are averaged, of lengths drawn from seeds 0, 1, ...

# Llama 3's 8B and 70B have as many key heads, of this dimension; 8B has as many heads. In bfloat16.
HEADS, KEY_HEADS, HEAD_DIM, ITEMSIZE = 32, 8, 128, 2
KEYS = 2 * KEY_HEADS * HEAD_DIM * ITEMSIZE  # bytes of a token's keys and values

# The lengths of a row's documents, drawn one after the other.
DOCUMENTS = {
    "chats (median 600)": lambda random: random.lognormal(6.4, 1),
    "mixture (median 2k, tail 60k)": lambda random: random.lognormal(7.6, 1.4),
    "long (16k to 48k)": lambda random: random.integers(16384, 49152),
    "one document": lambda random: TOKENS,
}

ORDERS = {
    "consecutive": lambda lengths, processes: consecutive(sum(lengths), processes),
    "head and tail": lambda lengths, processes: head_and_tail(sum(lengths), processes),
    "balanced": balanced,
}


@dataclass(frozen=True)
class Counted:
    # Bytes are those that the busiest process receives in one forward of one attention layer.
    documents: str
    processes: int
    ring: int
    ulysses: float | None  # None: there are fewer heads than processes
    orders: dict[str, tuple[float, float]]  # bytes, and the busiest process's work in means


def row(documents: str, seed: int, tokens: int = TOKENS) -> list[int]:
    random, lengths = np.random.default_rng(seed), []
    while sum(lengths) < tokens:
        lengths.append(max(1, min(int(DOCUMENTS[documents](random)), tokens - sum(lengths))))
    return lengths


def cost(lengths: list[int], order: Order) -> tuple[float, float]:
    received, work = measured(lengths, order)
    return float(received.max()) * KEYS, float(work.max() / work.mean())


def counts(rows: int = ROWS) -> list[Counted]:
    found = []
    for documents in DOCUMENTS:
        drawn = [row(documents, seed) for seed in range(rows if documents != "one document" else 1)]
        for processes in PROCESSES:
            own = TOKENS // processes
            costs = {
                name: [cost(lengths, order(lengths, processes)) for lengths in drawn] for name, order in ORDERS.items()
            }
            ulysses = bytes_sent_by_a_layer(own, processes, HEADS, KEY_HEADS, HEAD_DIM)
            found.append(
                Counted(
                    documents,
                    processes,
                    (TOKENS - own) * KEYS,
                    ulysses if processes <= HEADS else None,
                    {name: tuple(np.mean(each, 0).tolist()) for name, each in costs.items()},
                )
            )
    return found


def rendered(found: Iterable[Counted] | None = None) -> str:
    # MiB, and the busiest process's work in means of all
    head = ["documents", "processes", "ring, all-gather", "Ulysses", *ORDERS, *(f"work, {name}" for name in ORDERS)]
    rows = [
        [
            each.documents,
            str(each.processes),
            *(_shown(number) for number in (each.ring, each.ulysses)),
            *(_shown(each.orders[name][0]) for name in ORDERS),
            *(f"{each.orders[name][1]:.2f}" for name in ORDERS),
        ]
        for each in (counts() if found is None else found)
    ]
    return table(head, rows, numbers=True)


def _shown(number: float | None) -> str:
    if number is None:
        return "too few heads"
    return f"{number / 2**20:,.{0 if number >= 10 * 2**20 else 1}f}"
