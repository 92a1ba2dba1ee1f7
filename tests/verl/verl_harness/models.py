"""Tiny Hugging Face folders with weights and a tokenizer, for verl to read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 96
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "moe": ("Qwen3MoeConfig", {**_EXPERTS, "norm_topk_prob": True, "decoder_sparse_step": 1}),
}


def save_tiny(kind: str, folder: Path, **shape: Any) -> Path:
    """A folder with random weights of one of `KINDS`; shape: fields other than the tiny ones."""
    import transformers

    name, fields = KINDS[kind]
    config = getattr(transformers, name)(**{**_SHAPE, **fields, **shape}, dtype="float32")
    torch.manual_seed(len(kind))
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        # Norms start at 1 and biases at 0: equal weights would hide one taken for another.
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.save_pretrained(folder)
    _save_tokenizer(folder, config.vocab_size)
    return folder


def _save_tokenizer(folder: Path, vocab_size: int) -> None:
    import tokenizers
    import transformers

    words = {f"t{i}": i for i in range(vocab_size)}
    words = {"<pad>": 0, "<eos>": 1, **{word: i for word, i in words.items() if i > 1}}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    tokenizer.save_pretrained(folder)
