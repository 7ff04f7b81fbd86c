"""Makes small models with random weights: a Llama, hybrids, one that sees, and LoRA adapters.

A model is made once for each folder, and the same arguments give the same weights.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Describes a Llama with random weights. The defaults make it tiny."""

    layers: int = 4
    hidden: int = 256
    intermediate: int | None = None
    """Of the feed-forward layers; None: twice `hidden`."""
    heads: int = 4
    kv_heads: int = 2
    weights_std: float = 0.02
    """Of the random weights. Above 0.05 the answer depends on all of the prompt: at 0.02 256
    tokens in its middle can be wrong without another token."""
    vocabulary: int = 512
    context_tokens: int = 4096
    seed: int = 7


def build_model(path: Path, shape: ModelShape = ModelShape()) -> Path:
    """Write the model to `path` unless it is there; the same shape gives the same weights."""
    if (path / "config.json").exists():
        return path
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(shape.seed)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate or shape.hidden * 2,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.context_tokens,
        initializer_range=shape.weights_std,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


def cpu_dtype() -> str:
    """Return the quick type of this CPU: without AVX-512 it computes bfloat16 four times slower
    than float32, with it twice as fast."""
    flags = Path("/proc/cpuinfo").read_text()
    return "bfloat16" if "avx512f" in flags or "bf16" in flags else "float32"


def build_sliding(path: Path) -> Path:
    """Write a Gemma 3, every other layer with a window of 128 tokens: two KV cache groups."""
    if (path / "config.json").exists():
        return path
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(3)
    config = Gemma3TextConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 2,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    Gemma3ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


def build_deepseek(
    path: Path, layers: int = 2, heads: int = 4, rope_scaling: dict[str, Any] | None = None
) -> Path:
    """Write a DeepSeek-V2 with random weights. Its latents are as wide as vLLM's kernel for CPUs
    takes."""
    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    torch.manual_seed(3)
    config = DeepseekV2Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        q_lora_rank=None,
        first_k_dense_replace=layers,
        moe_layer_freq=1,
        n_routed_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=64,
        max_position_embeddings=4096,
        rope_scaling=rope_scaling,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=1,
        architectures=["DeepseekV2ForCausalLM"],
    )
    DeepseekV2ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


def build_states(path: Path) -> Path:
    """Write a Qwen3-Next: three layers of linear attention, one of full attention, few experts.

    Its heads are 128 wide because vLLM's CPU kernels take no others.
    """
    if (path / "config.json").exists():
        return path
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=500,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=256,
        max_position_embeddings=4096,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        decoder_sparse_step=1,
        initializer_range=0.2,
        architectures=["Qwen3NextForCausalLM"],
    )
    Qwen3NextForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


IMAGE_TOKEN = 511
IMAGE_PIXELS = 28
IMAGE_TOKENS = 4
"""That stand for one image, before its prompt."""


def build_seeing(path: Path) -> Path:
    """Write a BLIP-2, one of the models with pictures that vLLM runs without torchvision: a small
    tower and Q-Former before an OPT, with a tokenizer of one word a token."""
    if (path / "config.json").exists():
        return path
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        Blip2Config,
        Blip2ForConditionalGeneration,
        Blip2Processor,
        BlipImageProcessorPil,
        PreTrainedTokenizerFast,
    )

    torch.manual_seed(5)
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = Blip2Config(
        vision_config={
            **small,
            "num_attention_heads": 2,
            "image_size": IMAGE_PIXELS,
            "patch_size": 14,
            "initializer_range": 0.3,
        },
        qformer_config={
            **small,
            "num_attention_heads": 2,
            "encoder_hidden_size": 64,
            "vocab_size": 512,
            "initializer_range": 0.3,
        },
        text_config={
            "model_type": "opt",
            "vocab_size": 512,
            "hidden_size": 256,
            "word_embed_proj_dim": 256,
            "ffn_dim": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "max_position_embeddings": 4096,
            "init_std": 0.1,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 0,
        },
        num_query_tokens=IMAGE_TOKENS,
        image_token_index=IMAGE_TOKEN,
    )
    model = Blip2ForConditionalGeneration(config)
    torch.nn.init.normal_(model.query_tokens)
    model.to(torch.bfloat16).save_pretrained(path)
    words = {f"t{i}": i for i in range(IMAGE_TOKEN)} | {"<image>": IMAGE_TOKEN}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    size = {"height": IMAGE_PIXELS, "width": IMAGE_PIXELS}
    Blip2Processor(
        image_processor=BlipImageProcessorPil(size=size),
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token="t0",
            eos_token="t1",
            pad_token="t0",
            unk_token="t2",
            additional_special_tokens=["<image>"],
        ),
        num_query_tokens=IMAGE_TOKENS,
    ).save_pretrained(path)
    return path


def picture(seed: int) -> Any:
    """Return a picture of random pixels."""
    import numpy as np
    from PIL import Image

    shape = (IMAGE_PIXELS, IMAGE_PIXELS, 3)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype="uint8"))


def build_adapter(path: Path, seed: int, shape: ModelShape = ModelShape()) -> Path:
    """Write a LoRA adapter of rank 8 for a model of `shape`, large enough to be seen in its
    answers. What lay at `path` is gone."""
    import torch
    from safetensors.torch import save_file

    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    rng = torch.Generator().manual_seed(seed)
    rank, head = 8, shape.hidden // shape.heads
    outputs = {"q_proj": shape.heads * head, "k_proj": shape.kv_heads * head}
    outputs["v_proj"] = outputs["k_proj"]
    tensors = {}
    for layer in range(shape.layers):
        for name, size in outputs.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{place}.lora_A.weight"] = torch.randn(rank, shape.hidden, generator=rng) * 0.3
            tensors[f"{place}.lora_B.weight"] = torch.randn(size, rank, generator=rng) * 0.3
    save_file(tensors, path / "adapter_model.safetensors")
    adapter = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(outputs),
    }
    (path / "adapter_config.json").write_text(json.dumps(adapter))
    return path


def hub_cache(folder: Path, name: str, revisions: dict[str, Path]) -> Path:
    """Lay out `folder` as Hugging Face's cache does, with a model of that `name` of which each
    revision (40 hex digits) is the files of a folder."""
    repo = folder / f"models--{name.replace('/', '--')}"
    for revision, files in revisions.items():
        shutil.copytree(files, repo / "snapshots" / revision, dirs_exist_ok=True)
    (repo / "refs").mkdir(parents=True, exist_ok=True)
    (repo / "refs" / "main").write_text(next(iter(revisions)))
    return folder
