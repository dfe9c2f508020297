"""What a stream holds in memory, and how large its state is, from 10^5 to 10^7 documents."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from fa2patch import packing

from .. import environments
from . import workloads
from .workloads import FLAN

MAX_TOKENS = 4096


class Documents:
    # The documents are made when they are read. Their FLAN-like lengths repeat after 10^5 documents.

    def __init__(self, count: int) -> None:
        self.count, self.at = count, 0
        self.lengths = FLAN.draw(100_000)

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        for number in range(self.count):
            self.at = number + 1
            yield {"input_ids": [number] * self.lengths[number % len(self.lengths)]}


class Resumable(Documents):
    # These documents have a position that can be saved.

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Nothing is resumed here."""


KINDS = {"read again from the beginning": Documents, "with a position of their own": Resumable}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("documents", [100_000, 1_000_000, 10_000_000])
def bench_streams(rows: list[Any], quick: bool, documents: int, kind: str) -> None:
    """The peak of memory of a whole iteration over a stream, and the largest of its states.

    Rows of 4096 tokens and a buffer of 1000 documents, of FLAN-like lengths. The peak is what is in use beyond what was
    in use before, in a process of its own. A state is saved at every thousandth row; its size is that of its JSON.
    """
    count = documents // 100 if quick else documents
    found = environments.printed("compat_matrix.bench.bench_streams", kind, str(count))
    rows.append({"documents": count, "examples": kind, **json.loads(found)})


def main(kind: str, documents: str) -> None:
    stream = packing.stream(KINDS[kind](int(documents)), MAX_TOKENS)
    states = [0]

    def read() -> None:
        for number, _ in enumerate(stream):
            if number % 1000 == 500:
                states.append(len(json.dumps(stream.state_dict())))

    peak = round(workloads.peak_of(read) / 1e6, 1)
    print(json.dumps({"peak, MB": peak, "state, kB": round(max(states) / 1e3, 1), "full": f"{stream.fill:.2%}"}))


if __name__ == "__main__":
    main(*sys.argv[1:])
