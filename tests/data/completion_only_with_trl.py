"""Compare TRL's DataCollatorForCompletionOnlyLM with ours on the same examples, in a TRL that has one.

Run by test_completion_only.py. Prints a JSON object with the number of batches and the differences.
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


def main():
    words, draw, differ, seen = tokenizer(), random.Random(0), [], 0
    old = "padding_free" in inspect.signature(trl.DataCollatorForCompletionOnlyLM).parameters
    for kind in ("ids", "text"):
        template = (lambda ids: ids) if kind == "ids" else (lambda ids: " ".join(f"w{i}" for i in ids))
        for instruction in (None, template(HUMAN)):
            # TRL pairs turns by their index, which agrees with the templates only if the turns alternate
            shapes = ("hr", "hrhr", "hrhrh", "h", "r") if instruction is not None else ("hr", "hrhr", "h", "r")
            for padding_free in (True, False):
                for multiple in (None, 8) if not padding_free else (None,):
                    options = {"tokenizer": words, "padding_free": padding_free, "pad_to_multiple_of": multiple}
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
                        keys = {"input_ids", "labels", "position_ids" if padding_free else "attention_mask"}
                        seen += 1
                        for key in keys:
                            if found[key].tolist() != expected[key].tolist() or found[key].dtype != expected[key].dtype:
                                differ.append([kind, instruction, options["padding_free"], key, str(examples)])
                        if set(found) != keys or bool(told) != bool(of_theirs):
                            differ.append([kind, instruction, sorted(found), len(told), of_theirs])
    print(json.dumps({"trl": trl.__version__, "padding_free": old, "batches": seen, "differ": differ[:3]}))


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    main()
