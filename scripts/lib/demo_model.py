"""Writes the demos' model and a tokenizer to a directory: `python demo_model.py DIR`.

The weights are random, so its answers mean nothing. A token is a byte of the prompt.
"""

from __future__ import annotations

import sys
from pathlib import Path

from engines import ModelShape, build_model

MODEL = ModelShape(layers=8, hidden=512, heads=8, kv_heads=4, vocabulary=4096, context_tokens=4096)


def build_tokenizer(path: Path, vocabulary: int) -> None:
    """Write a tokenizer with one token for each byte, and words for the ids that remain."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [f"\u0120w{i}" for i in range(len(tokens), vocabulary)]  # \u0120: a space
    made = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    fast.save_pretrained(path)


def build(path: Path) -> None:
    """Write model and tokenizer, unless they are there."""
    if not (path / "tokenizer.json").exists():
        build_model(path, MODEL)
        build_tokenizer(path, MODEL.vocabulary)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
