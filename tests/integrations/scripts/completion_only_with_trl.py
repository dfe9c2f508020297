"""Compare TRL's DataCollatorForCompletionOnlyLM with ours on the same examples, in a TRL that has one.
Prints a JSON object with the number of batches, the differences, and what TRL's class accepts and ours does not.
"""

from __future__ import annotations

import inspect
import json
import random
import warnings

import tokenizers
import transformers
import trl

from fa2patch.data.completion_only import DataCollatorForCompletionOnlyLM

HUMAN, RESPONSE = [5, 6, 7], [5, 6, 8]
# Methods of TRL's base class that mask tokens at random, as mlm=True does.
OF_MASKING = {"create_rng", "generator", "get_generator", "tf_bernoulli"}


def tokenizer():
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w1"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="w0", eos_token="w2", unk_token="w1", padding_side="right"
    )


def example(draw, turns):
    ids = []
    for turn in turns:
        ids += (HUMAN if turn == "h" else RESPONSE) + [draw.randint(9, 63) for _ in range(draw.randint(0, 6))]
    return {"input_ids": ids, "attention_mask": [1] * len(ids)}


def refused():
    # TRL's parameters and attributes that ours lacks, or has another default for.
    parameters = {}
    for kind in reversed(trl.DataCollatorForCompletionOnlyLM.__mro__[:-1]):
        if "__init__" in vars(kind):
            parameters.update(inspect.signature(kind.__init__).parameters)
    theirs = {
        one.name: one.default for one in parameters.values() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    }
    ours = inspect.signature(DataCollatorForCompletionOnlyLM).parameters
    found = {name for name in theirs if name not in ours and name != "self"}
    required = ("response_template", "tokenizer")
    found |= {name for name in set(theirs) & set(ours) if name not in required and ours[name].default != theirs[name]}
    options = {name: theirs[name] for name in set(theirs) & set(ours) if name not in required}
    mine = DataCollatorForCompletionOnlyLM(RESPONSE, tokenizer=tokenizer(), **options)
    made = trl.DataCollatorForCompletionOnlyLM(RESPONSE, tokenizer=tokenizer())
    public = {name for name in dir(made) if not name.startswith("_") and "mask_tokens" not in name}
    return sorted({*found, *(name for name in public - OF_MASKING if not hasattr(mine, name))})


def main():
    words, draw, differ, seen = tokenizer(), random.Random(0), [], 0
    old = "padding_free" in inspect.signature(trl.DataCollatorForCompletionOnlyLM).parameters
    for kind in ("ids", "text"):
        template = (lambda ids: ids) if kind == "ids" else (lambda ids: " ".join(f"w{i}" for i in ids))
        for instruction in (None, template(HUMAN)):
            # TRL pairs turns by their index, which agrees with the templates only if the turns alternate
            shapes = ("hr", "hrhr", "hrhrh", "h", "r") if instruction is not None else ("hr", "hrhr", "h", "r")
            for padding_free in (True, False) if old else (False,):
                for multiple in (None, 8) if not padding_free else (None,):
                    options = {"tokenizer": words, "pad_to_multiple_of": multiple}
                    if padding_free:
                        options["padding_free"] = True
                    theirs = trl.DataCollatorForCompletionOnlyLM(template(RESPONSE), instruction, **options)
                    ours = DataCollatorForCompletionOnlyLM(template(RESPONSE), instruction, **options)
                    for _ in range(20):
                        examples = [example(draw, draw.choice(shapes)) for _ in range(draw.randint(1, 4))]
                        with warnings.catch_warnings(record=True) as told:
                            warnings.simplefilter("always")
                            expected = theirs([dict(one) for one in examples])
                            of_theirs = len({str(one.message) for one in told if "Could not find" in str(one.message)})
                        with warnings.catch_warnings(record=True) as told:
                            warnings.simplefilter("always")
                            found = ours(examples)
                        # in a row, ours has integers, which BatchEncoding.to drops
                        if type(found) is not (dict if padding_free else type(expected)):
                            differ.append([kind, type(found).__name__, type(expected).__name__])
                        keys = {"input_ids", "labels", "position_ids" if padding_free else "attention_mask"}
                        lengths = {"cu_seq_lens_q", "cu_seq_lens_k"} if padding_free else set()
                        if "cu_seq_lens_q" in expected:  # since 0.14
                            keys |= lengths
                        seen += 1
                        for key in keys:
                            if found[key].tolist() != expected[key].tolist() or found[key].dtype != expected[key].dtype:
                                differ.append([kind, instruction, padding_free, key, str(examples)])
                        more = {*lengths, "max_length_q", "max_length_k"} if padding_free else set()
                        same = all(int(found[key]) == int(expected[key]) for key in more - lengths if key in expected)
                        if set(found) != keys | more or not same or bool(told) != bool(of_theirs):
                            differ.append([kind, instruction, sorted(found), len(told), of_theirs])
    print(
        json.dumps(
            {"trl": trl.__version__, "padding_free": old, "batches": seen, "differ": differ[:3], "refused": refused()}
        )
    )


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    main()
