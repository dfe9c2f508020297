"""Only the text after the template is learned, however the tokenizer splits the template."""

from __future__ import annotations

import functools
import inspect
import pickle
import random
import string
import subprocess
import sys
import textwrap
import warnings
from collections import UserDict
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from fa2patch.data.completion_only import DataCollatorForCompletionOnlyLM
from fa2patch.errors import CollatorError

HUMAN, RESPONSE = "### Human:", "### Response:\n"
TOKENIZER = SimpleNamespace(encode=list, decode=str)
ROW = {"padding_free": True, "return_flash_attn_kwargs": False}


@functools.cache
def words(kind: str) -> Any:
    # The tokenizer has up to 600 tokens, trained on source code of the standard library.
    text = [inspect.getsource(module) for module in (textwrap, string, random)]
    text += ["### Human: what is it?\n### Response:\nIt is this.\n\n### Human: and that?\n### Response:\nThat too."]
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None if kind == "bytes" else "<unk>"))
    if kind == "bytes":  # like GPT-2, Llama 3 and Qwen
        inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.decoder = tokenizers.decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    else:  # like Llama 2: the first word gets a space, which decoding drops
        inner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
        inner.decoder = tokenizers.decoders.Metaspace()
        alphabet = sorted(set("".join(text)))
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<pad>", "</s>", "<unk>"], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(text * 4, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="</s>")


def encoded(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return found["input_ids"], found["offset_mapping"]


def labels_of(batch: dict[str, Any]) -> list[list[int]]:
    starts = [at for at, position in enumerate(batch["position_ids"][0].tolist()) if position == 0]
    flat = batch["labels"][0].tolist()
    return [flat[start:end] for start, end in zip(starts, [*starts[1:], len(flat)])]


def responses(text: str, turns: bool) -> list[tuple[int, int]]:
    # Returns where the characters of responses start and end, found in the text alone.
    found, at = [], text.find(RESPONSE)
    while at >= 0:
        begin = at + len(RESPONSE)
        stop = text.find(HUMAN, begin) if turns else -1
        at = text.find(RESPONSE, begin)
        found.append((begin, stop if stop >= 0 else len(text)))
    return found if turns else [(found[-1][0], len(text))]


SINGLE = [
    f"{HUMAN} what is textwrap?\n{RESPONSE}A module.",
    f"x {HUMAN} wrap this\n{RESPONSE}\n\nindented, after an empty line",
    f"{RESPONSE}it begins at once",
    f"{HUMAN} say {RESPONSE}first, then\n{RESPONSE}second: only this is learned",
]
TURNS = [
    f"{HUMAN} a?\n{RESPONSE}b. c.\n\n{HUMAN} d?\n{RESPONSE}e.",
    f"{HUMAN} a?{RESPONSE}b{HUMAN}d?{RESPONSE}e.\n{HUMAN} and this is not answered",
    f"preamble\n{RESPONSE}before anybody asked {HUMAN} d?\n{RESPONSE}e",
    f"{HUMAN} a?\n{RESPONSE}b, a tool says\n{RESPONSE}c\n{HUMAN} d",
]


@pytest.mark.parametrize("kind", ["bytes", "metaspace"])
@pytest.mark.parametrize("turns", [False, True], ids=["single", "turns"])
def test_what_is_learned_is_what_the_text_says(kind: str, turns: bool) -> None:
    tokenizer = words(kind)
    texts = TURNS if turns else SINGLE
    encodings = [encoded(tokenizer, text) for text in texts]
    collate = DataCollatorForCompletionOnlyLM(RESPONSE, HUMAN if turns else None, tokenizer, **ROW)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = collate([{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids, _ in encodings])
    assert list(batch) == ["input_ids", "labels", "position_ids"]
    learned = 0
    for text, (ids, offsets), labels in zip(texts, encodings, labels_of(batch)):
        spans = responses(text, turns)
        # a token is learned if all of its characters are in a response, and it is not the document's first
        for at, (token, (start, end), label) in enumerate(zip(ids, offsets, labels)):
            inside = any(begin <= start and end <= stop for begin, stop in spans)
            template = any(text.startswith(RESPONSE, s) and s <= start < s + len(RESPONSE) for s in range(len(text)))
            expected = token if inside and at > 0 and not (turns and template) else -100
            assert label == expected, (text, at, text[start:end])
            learned += label != -100
    assert learned > 8


def test_templates_are_cut_differently_in_context_here() -> None:
    # A search for the template's own tokens misses some templates. Otherwise the test above would show nothing.
    for kind in ("bytes", "metaspace"):
        tokenizer = words(kind)
        template = tokenizer.encode(RESPONSE, add_special_tokens=False)
        missed = 0
        for text in SINGLE + TURNS:
            ids, _ = encoded(tokenizer, text)
            found = sum(ids[at : at + len(template)] == template for at in range(len(ids)))
            missed += found < text.count(RESPONSE)
        assert missed > 0, kind


def test_token_ids_need_no_tokenizer() -> None:
    collate = DataCollatorForCompletionOnlyLM(
        [7, 8], [9], padding_free=True, return_flash_attn_kwargs=True, return_seq_idx=True
    )
    batch = collate([[9, 1, 7, 8, 2, 3, 9, 4, 7, 8, 5], {"input_ids": [9, 7, 8, 6]}])
    assert batch["labels"].tolist() == [[-100] * 4 + [2, 3] + [-100] * 4 + [5] + [-100] * 3 + [6]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 11, 15]
    assert batch["max_length_q"] == 11
    assert batch["seq_idx"].tolist() == [[0] * 11 + [1] * 4]
    assert pickle.loads(pickle.dumps(collate))([[7, 8, 9]])["labels"].tolist() == [[-100] * 3]


def test_a_warning_names_the_example_and_nothing_of_it_is_learned() -> None:
    collate = DataCollatorForCompletionOnlyLM([7, 8], **ROW)
    with pytest.warns(UserWarning, match=r"example 1 of the batch \(3 tokens\): response_template \[7, 8\] not found"):
        batch = collate([[1, 7, 8, 2], [7, 3, 8], [7, 8, 4]])
    assert batch["labels"].tolist() == [[-100, -100, -100, 2, -100, -100, -100, -100, -100, 4]]
    both = DataCollatorForCompletionOnlyLM([7], [9], **ROW)
    with pytest.warns(UserWarning, match=r"example 0 .*instruction_template \[9\] not found"):
        assert set(both([[1, 7, 2]])["labels"].flatten().tolist()) == {-100}
    text = DataCollatorForCompletionOnlyLM(RESPONSE, tokenizer=words("bytes"))
    with pytest.warns(UserWarning, match=r"which begins 'no template'.*'### Response:\\n' not found"):
        text([words("bytes").encode("no template")])


def test_masked_tokens_are_dropped_and_an_end_that_pads_is_learned() -> None:
    tokenizer = words("bytes")
    ids = [*tokenizer.encode(RESPONSE), 1]
    padded = {"input_ids": ids + [1, 1], "attention_mask": [1] * len(ids) + [0, 0]}
    batch = DataCollatorForCompletionOnlyLM(RESPONSE, tokenizer=tokenizer, **ROW)([padded])
    assert batch["labels"][0].tolist() == [-100] * (len(ids) - 1) + [1]


def test_given_labels_that_are_ignored_stay_so() -> None:
    example = {"input_ids": [7, 1, 2, 3], "labels": [7, 1, -100, 30]}
    assert DataCollatorForCompletionOnlyLM([7], **ROW)([example])["labels"].tolist() == [[-100, 1, -100, 30]]


def test_padded() -> None:
    tokenizer = words("bytes")
    options = {"pad_to_multiple_of": 3, "ignore_index": -7}
    collate = DataCollatorForCompletionOnlyLM([7], tokenizer=tokenizer, **options)
    examples = [{"input_ids": [5, 7, 1, 2], "weights": [1, 2, 3, 4]}, {"input_ids": [7, 3], "weights": [5, 6]}]
    batch = collate(examples)
    assert {key: value.tolist() for key, value in batch.items()} == {
        "input_ids": [[5, 7, 1, 2, 0, 0], [7, 3, 0, 0, 0, 0]],
        "attention_mask": [[1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]],
        "labels": [[-7, -7, 1, 2, -7, -7], [-7, 3, -7, -7, -7, -7]],
        "weights": [[1, 2, 3, 4, 0, 0], [5, 6, 0, 0, 0, 0]],
    }
    assert all(value.dtype == torch.int64 for value in batch.values())
    assert type(collate(examples, return_tensors="np")["labels"]).__module__ == "numpy"
    with pytest.raises(CollatorError, match="return_tensors: expected 'pt' or 'np', found 'tf'"):
        collate(examples, return_tensors="tf")


def test_row_padded_to_a_multiple() -> None:
    collate = DataCollatorForCompletionOnlyLM([7], pad_to_multiple_of=4, ignore_index=-7, **ROW)
    batch = collate([[7, 1, 2], [7, 3]])
    assert batch["labels"].tolist() == [[-7, 1, 2, -7, 3, -7, -7, -7]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]


@pytest.mark.parametrize(
    ("template", "options", "message"),
    [
        ("### Response:", {}, "response_template is text: a tokenizer is needed"),
        ([], {}, "response_template: expected text or token ids"),
        ([7], {"instruction_template": []}, "instruction_template: expected text or token ids"),
        ([7], {"mlm": True}, "mlm=True"),
        ([7], {"ignore_index": "no"}, "ignore_index: expected an integer"),
        ([7], {"pad_to_multiple_of": 0}, "pad_to_multiple_of"),
        (TOKENIZER, {"instruction_template": "Answer:"}, "found a tokenizer .*the other way round"),
        ("Answer:", {"instruction_template": TOKENIZER}, "instruction_template: expected text .*found a tokenizer"),
        ("Answer:", {"tokenizer": "gpt2"}, "tokenizer: expected an object with encode and decode, found 'gpt2'"),
        (5, {}, "response_template: expected text or token ids, found 5"),
        (None, {}, "response_template: expected text or token ids, found None"),
    ],
)
def test_errors(template: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(CollatorError, match=message):
        DataCollatorForCompletionOnlyLM(template, **options)


def test_errors_of_examples() -> None:
    collate = DataCollatorForCompletionOnlyLM([7])
    with pytest.raises(CollatorError, match="found an empty batch"):
        collate([])
    with pytest.raises(CollatorError, match="all 2 examples of the batch came without tokens"):
        collate([[], []])
    with pytest.raises(CollatorError, match="needs a tokenizer with a pad_token_id"):
        collate([[7], [7, 1]])
    with pytest.raises(CollatorError, match="needs a tokenizer with a pad_token_id"):
        DataCollatorForCompletionOnlyLM([7], pad_to_multiple_of=4)([[7, 1]])
    with pytest.raises(CollatorError, match="tf_call: expected torch_call or numpy_call"):
        collate.tf_call([[7, 1]])
    with pytest.raises(CollatorError, match="expected a list of examples, found int"):
        collate(7)
    for columns in ({"input_ids": [[7, 1], [7]]}, UserDict(input_ids=[[7, 1], [7]])):
        with pytest.raises(CollatorError, match="found a (dict|UserDict) of input_ids. Give one mapping for each"):
            collate(columns)
    with pytest.raises(CollatorError, match="example 0: expected a mapping, found str. Text is tokenized first"):
        collate(["a text"])
    with pytest.raises(CollatorError, match="example 0: expected a mapping, found NoneType"):
        collate([None])


def test_needs_neither_transformers_nor_trl() -> None:
    code = (
        "import sys, fa2patch.data.collators, fa2patch.data.completion_only as c; "
        "c.DataCollatorForCompletionOnlyLM([7])([[7, 1]]); "
        "sys.exit(not {'transformers', 'trl'}.isdisjoint(sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_batch_of_a_row_has_the_lengths_of_newer_trl() -> None:
    collate = DataCollatorForCompletionOnlyLM([7], padding_free=True)
    batch = collate([[7, 1, 2], [7, 3]])
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [[0, 3, 5]]
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert batch["max_length_q"] == batch["max_length_k"] == 3


def test_a_tokenizer_makes_the_batch_an_encoding() -> None:
    examples = [{"input_ids": [7, 1, 2]}, {"input_ids": [7, 3]}]
    for options in ({}, {"padding_free": True, "return_flash_attn_kwargs": False}):
        batch = DataCollatorForCompletionOnlyLM([7], tokenizer=words("bytes"), **options)(examples)
        assert isinstance(batch, transformers.BatchEncoding)
        assert batch.to("cpu").labels.tolist() == batch["labels"].tolist()


def test_a_batch_with_integers_is_a_dict_as_an_encoding_of_older_releases_could_not_be_moved() -> None:
    batch = DataCollatorForCompletionOnlyLM([7], tokenizer=words("bytes"), padding_free=True)([{"input_ids": [7, 3]}])
    assert type(batch) is dict and type(batch["max_length_q"]) is int


def test_a_subclass_may_override_torch_call() -> None:
    class Counting(DataCollatorForCompletionOnlyLM):
        def torch_call(self, examples: Any) -> Any:
            return {**super().torch_call(examples), "examples": len(examples)}

    assert Counting([7])([[7, 1], [7, 2]])["examples"] == 2
    assert "examples" not in Counting([7])([[7, 1]], return_tensors="np")


def test_options_can_be_changed_after_the_collator_is_made() -> None:
    collate = DataCollatorForCompletionOnlyLM([7], mlm_probability=0.3)
    assert (collate.mlm, collate.mlm_probability, collate.pad_to_multiple_of) == (False, 0.3, None)
    collate.padding_free, collate.pad_to_multiple_of = True, 4
    assert collate([[7, 1, 2]])["input_ids"].shape == (1, 4)
