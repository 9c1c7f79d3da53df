"""The demo's GGUF model as a Hugging Face directory that vLLM can serve: bfloat16 safetensors, config, tokenizer.

    python tests/vllm/make_model.py DIRECTORY [--scale-first-norm 1.01] [--random]

The loader of the included engine has already undone llama.cpp's interleaving of Q and K rows. With --scale-first-norm the
weights are others (a stand-in for a fine-tune), the shapes are the same. With --random it is a small model of random weights
whose heads can be shared out among two ranks, with the same tokenizer.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from kvstore.engine_connector.engine.loader import LoadedModel, load_model
from kvstore.models import find_model

EOS = "<|im_end|>"
RANDOM_SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": False,
}


def make_model(directory: Path, *, scale_first_norm: float = 1.0) -> Path:
    """Write the model unless it is there. config.json comes last, so that a directory which has one is whole."""
    from safetensors.torch import save_file  # only where vLLM is

    if (directory / "config.json").exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    loaded = load_model(find_model())
    tensors = _tensors(loaded)
    tensors["model.layers.0.input_layernorm.weight"] *= scale_first_norm
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(loaded, directory)
    (directory / "config.json").write_text(json.dumps(_config(loaded), indent=1))
    return directory


def make_random_model(directory: Path) -> Path:
    """Likewise: 4 layers, 8 heads, 2 KV heads. Weights are large and the output has its own, or else one token would come again
    and again, whatever the KV."""
    from safetensors.torch import save_file  # as above

    if (directory / "config.json").exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    loaded = load_model(find_model())
    config = _config(loaded) | RANDOM_SHAPE
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], 256), "lm_head.weight": (config["vocab_size"], 256)}
    norms = ["model.norm.weight"]
    for index in range(4):
        prefix = f"model.layers.{index}."
        norms += [prefix + "input_layernorm.weight", prefix + "post_attention_layernorm.weight"]
        for name, shape in (("q", (256, 256)), ("k", (64, 256)), ("v", (64, 256)), ("o", (256, 256))):
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = shape
        for name, shape in (("gate", (512, 256)), ("up", (512, 256)), ("down", (256, 512))):
            shapes[f"{prefix}mlp.{name}_proj.weight"] = shape
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(shape, generator=generator) * 0.15 for name, shape in shapes.items()}
    tensors |= {name: torch.ones(256) for name in norms}
    save_file(
        {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    _write_tokenizer(loaded, directory)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    return directory


def make_hybrid_model(directory: Path, *, layers: Sequence[str] = ("sliding", "full")) -> Path:
    """Likewise: 6 layers, every second with a sliding window of 64 tokens, which vLLM keeps in layer groups. `layers` are
    repeated three times."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig  # only where vLLM is

    if (directory / "config.json").exists():
        return directory
    loaded = load_model(find_model())
    torch.manual_seed(1)
    config = Gemma3TextConfig(
        vocab_size=_config(loaded)["vocab_size"],
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3 * len(layers),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        sliding_window=64,
        layer_types=[f"{kind}_attention" for kind in layers] * 3,
        initializer_range=0.15,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = Gemma3ForCausalLM(config).to(torch.bfloat16)
    directory.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(loaded, directory)
    model.save_pretrained(directory)
    return directory


def make_adapter(directory: Path, *, seed: int) -> Path:
    """Write a LoRA adapter of random weights for the random model, over what was there."""
    from safetensors.torch import save_file  # as above

    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for index in range(4):
        for name, rows in (("q_proj", 256), ("v_proj", 64)):
            prefix = f"base_model.model.model.layers.{index}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn((8, 256), generator=generator) * 0.1
            tensors[f"{prefix}.lora_B.weight"] = torch.randn((rows, 8), generator=generator) * 0.1
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    about = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(about))
    return directory


def _tensors(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    config, weights = loaded.config, loaded.weights
    sizes = [config.num_heads * config.head_dim] + 2 * [config.num_kv_heads * config.head_dim]
    tensors = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.norm}
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}."
        q, k, v = layer.qkv.split(sizes)
        gate, up = layer.gate_up.chunk(2)
        tensors |= {
            prefix + "input_layernorm.weight": layer.attn_norm,
            prefix + "self_attn.q_proj.weight": q,
            prefix + "self_attn.k_proj.weight": k,
            prefix + "self_attn.v_proj.weight": v,
            prefix + "self_attn.o_proj.weight": layer.attn_out,
            prefix + "post_attention_layernorm.weight": layer.ffn_norm,
            prefix + "mlp.gate_proj.weight": gate,
            prefix + "mlp.up_proj.weight": up,
            prefix + "mlp.down_proj.weight": layer.down,
        }
    return {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}


def _config(loaded: LoadedModel) -> dict[str, object]:
    config, weights = loaded.config, loaded.weights
    assert weights.lm_head is weights.embedding
    assert not config.rope.divisors
    eos_id = loaded.tokenizer._text.token_to_id(EOS)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope.theta,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": True,
        "bos_token_id": eos_id,
        "eos_token_id": eos_id,
        "torch_dtype": "bfloat16",
    }


def _write_tokenizer(loaded: LoadedModel, directory: Path) -> None:
    loaded.tokenizer._text.save(str(directory / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "pad_token": EOS}
    (directory / "tokenizer_config.json").write_text(json.dumps(about))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--scale-first-norm", type=float, default=1.0)
    parser.add_argument("--random", action="store_true")
    arguments = parser.parse_args()
    if arguments.random:
        print(make_random_model(arguments.directory))
    else:
        print(make_model(arguments.directory, scale_first_norm=arguments.scale_first_norm))
