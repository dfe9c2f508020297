"""Memory and communication of long rows on paper, for the tables of docs/long_rows.md.

The counts are those of DeepSpeed-Ulysses (arXiv 2309.14509) with fa2patch's exchange, and of the tensors that
Transformers' Llama keeps for its backward (arXiv 2506.13996 has such a budget).
``tests/compat_matrix/test_long_rows.py`` compares the formulas with counted bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

IDS = 8  # bytes of a position id

# Bytes of one logit in a loss that is not chunked: bfloat16, a float32 copy and its float32 log-softmax.
LOGIT = 10

# Bytes of a parameter: bfloat16 weights and gradients (2 each), float32 weights (4) and Adam's moments (8).
STATES = 16


@dataclass(frozen=True)
class Decoder:
    # A Llama-like model whose embedding and head are two matrices.

    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_heads: int
    head_dim: int
    vocabulary: int

    @property
    def parameters(self) -> int:
        # Norms are left out.
        attention = 2 * self.hidden * (self.heads + self.key_heads) * self.head_dim
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + 2 * self.vocabulary * self.hidden


# Llama 3
DECODERS = {
    "1B": Decoder(16, 2048, 8192, 32, 8, 64, 128256),
    "8B": Decoder(32, 4096, 14336, 32, 8, 128, 128256),
    "70B": Decoder(80, 8192, 28672, 64, 8, 128, 128256),
}


def bytes_sent_by_a_layer(
    tokens: float, processes: int, heads: int, key_heads: int, head_dim: int, value_dim: int = 0, itemsize: int = 2
) -> float:
    # One process sends these in one forward of one attention layer; a backward sends as many. Queries, keys and values
    # are swapped before attention, and its output behind it. Of each, a process keeps one part of "processes". Key
    # heads that are fewer than the processes are sent to several of them.
    value_dim = value_dim or head_dim
    width = heads * (head_dim + value_dim) + max(key_heads, processes) * (head_dim + value_dim)
    return tokens * width * itemsize * (processes - 1) / processes


def bytes_sent_by_a_forward(tokens: float, processes: int) -> float:
    # Position ids go once to each of the other processes. With the whole rows' cu_seq_lens_q none are sent.
    return tokens * IDS * (processes - 1)


def bytes_sent_by_a_step(model: Decoder, tokens: float, processes: int, checkpointing: bool = True) -> float:
    # In bfloat16. Checkpointing computes the forward twice. Weights and gradients (ZeRO) are not counted.
    layer = bytes_sent_by_a_layer(tokens, processes, model.heads, model.key_heads, model.head_dim)
    return model.layers * layer * (3 if checkpointing else 2)


def bytes_kept_by_a_layer(model: Decoder, tokens: float, itemsize: int = 2) -> float:
    # Transformers' Llama keeps, for each of two norms, a float32 copy of its input, its value before the weight and its
    # output; queries, keys, values and the output of attention; four tensors of the MLP. Tensors that have one number
    # for each token are left out.
    norms = 2 * model.hidden * (4 + 2 * itemsize)
    attention = 2 * (model.heads + model.key_heads) * model.head_dim * itemsize
    return tokens * (norms + attention + 4 * model.intermediate * itemsize)


def bytes_of_activations(model: Decoder, tokens: float, checkpointing: bool = True) -> float:
    # In bfloat16. With checkpointing, a process keeps the input of each layer, and all tensors of one layer.
    layer = bytes_kept_by_a_layer(model, tokens)
    if checkpointing:
        return model.layers * tokens * model.hidden * 2 + layer
    return model.layers * layer


def bytes_of_logits(model: Decoder, tokens: float) -> float:
    # The loss is not computed in chunks.
    return tokens * model.vocabulary * LOGIT


def bytes_of_states(model: Decoder, processes: int) -> float:
    # ZeRO-3 divides them over all processes.
    return model.parameters * STATES / processes
