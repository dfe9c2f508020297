"""Run TRL's own tests of DataCollatorForCompletionOnlyLM: ``trl_collator_tests.py FILE fa2patch|trl``.

FILE is ``tests/test_data_collator_completion_only.py`` of TRL's sdist or of a checkout. Only its import is changed: the
collator comes from fa2patch, or, as the control, from TRL. Its tokenizers are on the hub; a tokenizer made here stands
in for each. Prints a JSON object with the names of the tests that passed, and the others with the end of their
traceback.
"""

from __future__ import annotations

import ast
import itertools
import json
import string
import sys
import types
import unittest
from pathlib import Path

import tokenizers
import transformers

IMPORT = "from trl import DataCollatorForCompletionOnlyLM"


def stand_in(source):
    # It splits text as GPT-2 and Qwen2 do, has a token for each word in the source's string literals, and at least
    # 10,000 tokens.
    split = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    texts = [node.value for node in ast.walk(ast.parse(source)) if isinstance(getattr(node, "value", None), str)]
    words = {piece for text in texts for piece, _ in split.pre_tokenize_str(text)}
    fillers = ("zq" + "".join(letters) for letters in itertools.product(string.ascii_lowercase, repeat=3))
    names = ["<|endoftext|>", "<pad>", *sorted(words), *itertools.islice(fillers, 10_000)]
    vocabulary = {name: number for number, name in enumerate(dict.fromkeys(names))}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<|endoftext|>"))
    inner.pre_tokenizer, inner.decoder = split, tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<|endoftext|>", unk_token="<|endoftext|>"
    )


def main(file, package):
    source = Path(file).read_text(encoding="utf-8")
    assert IMPORT in source, f"{file} does not import the collator as expected"
    tokenizer = stand_in(source)
    transformers.AutoTokenizer.from_pretrained = lambda name, **options: tokenizer
    module = types.ModuleType("theirs")
    exec(compile(source.replace(IMPORT, IMPORT.replace("trl", package, 1)), file, "exec"), vars(module))
    result = unittest.TestResult()
    suite = unittest.defaultTestLoader.loadTestsFromModule(module)
    ran = [test.id().rpartition(".")[2] for group in suite for test in group]
    suite.run(result)
    failed = {test.id().rpartition(".")[2]: said[-600:] for test, said in (*result.failures, *result.errors)}
    assert len(ran) == result.testsRun and not result.skipped
    print(json.dumps({"passed": [name for name in ran if name not in failed], "failed": failed}))


if __name__ == "__main__":
    main(*sys.argv[1:])
