"""The memory and communication model of long rows equals counted bytes."""

from __future__ import annotations

import pytest
import torch
import transformers
from torchrun import launched

from compat_matrix import long_rows
from compat_matrix.long_rows import DECODERS, Decoder
from compat_matrix.publish import blocks


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_processes_send_as_many_bytes_as_on_paper(processes):
    found = launched(f"traffic, {processes} processes")
    for case, (heads, counted) in found["cases"].items():
        on_paper = long_rows.bytes_sent_by_a_layer(12, processes, *heads)
        assert counted == [on_paper, on_paper], case
    assert len(found["cases"]) == 4 and found["ids"] == long_rows.bytes_sent_by_a_forward(12, processes)


def kept(layers: int, shape: Decoder, tokens: int) -> int:
    """The bytes that Llama keeps for a backward, without the weights."""
    config = transformers.LlamaConfig(
        hidden_size=shape.hidden, intermediate_size=shape.intermediate, num_hidden_layers=layers, vocab_size=9,
        num_attention_heads=shape.heads, num_key_value_heads=shape.key_heads, attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.LlamaModel(config).bfloat16().train()
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage
        return tensor

    inputs = torch.randn(1, tokens, shape.hidden, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(inputs_embeds=inputs, use_cache=False).last_hidden_state
    assert output.requires_grad
    return sum(storage.nbytes() for storage in found.values())


def test_a_layer_keeps_as_many_bytes_as_on_paper():
    shape, tokens = Decoder(1, 64, 160, 4, 4, 16, 9), 512
    counted = kept(3, shape, tokens) - kept(2, shape, tokens)
    for_each_token = 4 * (2 + shape.heads)  # two norms' means and the log-sum-exp, in float32
    assert counted == long_rows.bytes_kept_by_a_layer(shape, tokens) + for_each_token * tokens


@pytest.mark.parametrize(("name", "parameters"), [("8B", 8.03e9), ("70B", 70.55e9)])
def test_parameters_are_those_of_llama(name, parameters):
    assert DECODERS[name].parameters == pytest.approx(parameters, rel=1e-3)


def test_checkpointing_keeps_inputs_and_computes_forwards_again():
    model = DECODERS["8B"]
    least = model.layers * 1000 * model.hidden * 2
    assert least < long_rows.bytes_of_activations(model, 1000) < least * 2
    with_and_without = [
        long_rows.bytes_sent_by_a_step(model, 1000, 4, checkpointing) for checkpointing in (True, False)
    ]
    assert with_and_without[0] == 1.5 * with_and_without[1]
    assert long_rows.bytes_sent_by_a_step(model, 1000, 1) == 0


def test_the_first_way_that_fits_is_named():
    model = DECODERS["8B"]
    assert blocks.engine(model, 2**10, 8) == "ZeRO-3"
    assert blocks.engine(model, 2**18, 8) == "ZeRO-3, Ulysses over 4, checkpointing, loss in chunks"
    assert blocks.engine(model, 2**24, 8) == "does not fit"
    assert blocks.engine(DECODERS["70B"], 2**10, 8) == "weights and optimizer do not fit"


@pytest.mark.parametrize(
    ("number", "said"),
    [(2**19, "0.5 MiB"), (320 * 2**20, "320 MiB"), (5 * 2**30, "5.0 GiB"), (3136 * 2**30, "3,136 GiB")],
)
def test_sizes(number, said):
    assert blocks.size(number) == said
