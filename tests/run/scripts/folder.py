"""Save a tiny Llama with large weights, a tokenizer and documents for the scripts: ``python folder.py FOLDER``."""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from compat_matrix import tiny_configs, tiny_models
from compat_matrix.check.rows import documents

LENGTHS = (9, 21, 5, 14, 30, 7, 2, 12)


def make(folder: Path) -> None:
    model = tiny_models.build("llama", "sdpa")
    model.save_pretrained(folder)
    words = {"[PAD]": 0, "[BOS]": 1, "[EOS]": 2, **{f"w{n}": n for n in range(3, tiny_configs.VOCABULARY)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = Whitespace()
    special = {"pad_token": "[PAD]", "bos_token": "[BOS]", "eos_token": "[EOS]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="right", **special).save_pretrained(folder)
    texts = [document.tolist() for document in documents(*LENGTHS)]
    (folder / "documents.json").write_text(json.dumps(texts))
    (folder / "data").mkdir()
    rows = [json.dumps({"text": " ".join(f"w{token}" for token in text)}) for text in texts]
    (folder / "data" / "train.jsonl").write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
