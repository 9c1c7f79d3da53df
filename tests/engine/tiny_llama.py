"""A random Llama model small enough to run in milliseconds, as a GGUF file, and a dense forward pass to compare with.

The dense pass shares nothing with the engine: float64 numpy, all tokens at once, Q and K as they lie in the file, rotary
positions on neighbouring pairs. K and V are rounded as the engine's pages round them.
"""

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from kvstore.engine_connector.engine.llm import RequestOutput

TIE_EPSILON = 0.02
LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, FFN, CONTEXT, THETA, EPS = 4, 64, 4, 2, 16, 96, 1024, 10000.0, 1e-5
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("t h", "th e", "Ġ the", "1 2", "e r")


def byte_alphabet() -> list[str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(shifted)) for b in range(256)]


TOKENS = [*CONTROL, *byte_alphabet(), *(m.replace(" ", "") for m in MERGES)]


@dataclass(frozen=True)
class TinyModel:
    path: Path
    tensors: dict[str, np.ndarray]


def random_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Weights large enough that attention is sharp: a wrong K or V changes the next token."""
    rng = np.random.default_rng(seed)

    def matrix(out: int, into: int, gain: float) -> np.ndarray:
        return (rng.standard_normal((out, into)) * gain / np.sqrt(into)).astype(np.float32)

    tensors = {
        "token_embd": matrix(len(TOKENS), HIDDEN, 8.0),
        "output": matrix(len(TOKENS), HIDDEN, 4.0),
        "output_norm": rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32),
    }
    for layer in range(LAYERS):
        shapes = {
            "attn_q": (HEADS * DIM, HIDDEN, 1.7),
            "attn_k": (KV_HEADS * DIM, HIDDEN, 1.7),
            "attn_v": (KV_HEADS * DIM, HIDDEN, 1.0),
            "attn_output": (HIDDEN, HEADS * DIM, 1.5),
            "ffn_gate": (FFN, HIDDEN, 1.0),
            "ffn_up": (FFN, HIDDEN, 1.0),
            "ffn_down": (HIDDEN, FFN, 1.0),
        }
        tensors |= {f"blk.{layer}.{name}": matrix(*shape) for name, shape in shapes.items()}
        tensors |= {
            f"blk.{layer}.{name}": rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32)
            for name in ("attn_norm", "ffn_norm")
        }
    return tensors


def write_gguf(path: Path, tensors: dict[str, np.ndarray], *, arch: str = "llama", **changes: object) -> Path:
    """`changes` replace settings by their key with dots as `__`; None leaves a setting out."""
    writer = gguf.GGUFWriter(path, arch)
    settings: dict[str, object] = {
        "block_count": LAYERS,
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention__head_count": HEADS,
        "attention__head_count_kv": KV_HEADS,
        "rope__dimension_count": DIM,
        "rope__freq_base": THETA,
        "attention__layer_norm_rms_epsilon": EPS,
    } | changes
    for name, value in settings.items():
        key = f"{arch}." + name.replace("__", ".")
        if isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(TOKENS) - len(CONTROL)))
    writer.add_token_merges(list(MERGES))
    writer.add_eos_token_id(2)
    for name, data in tensors.items():
        writer.add_tensor(name + ".weight", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def dense_logits(tensors: dict[str, np.ndarray], token_ids: list[int], kv_dtype: type = np.float16) -> np.ndarray:
    """Logits `[tokens, vocab]` of a whole sequence, without pages, chunks or batches."""
    w = {name: data.astype(np.float64) for name, data in tensors.items()}
    n = len(token_ids)
    frequencies = THETA ** -(np.arange(0, DIM, 2) / DIM)
    turn = np.exp(1j * np.arange(n)[:, None] * frequencies)  # rotation of a pair = a complex factor

    def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * scale

    def heads(x: np.ndarray, count: int) -> np.ndarray:
        return x.reshape(n, count, DIM).transpose(1, 0, 2)

    def rotate(x: np.ndarray) -> np.ndarray:
        turned = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
        return np.stack([turned.real, turned.imag], -1).reshape(x.shape)

    x = w["token_embd"][token_ids]
    for layer in range(LAYERS):
        p = f"blk.{layer}."
        h = norm(x, w[p + "attn_norm"])
        q = rotate(heads(h @ w[p + "attn_q"].T, HEADS))
        k = rotate(heads(h @ w[p + "attn_k"].T, KV_HEADS)).astype(kv_dtype).astype(np.float64)
        v = heads(h @ w[p + "attn_v"].T, KV_HEADS).astype(kv_dtype).astype(np.float64)
        k, v = (np.repeat(t, HEADS // KV_HEADS, axis=0) for t in (k, v))
        scores = q @ k.transpose(0, 2, 1) / np.sqrt(DIM)
        scores[:, ~np.tri(n, dtype=bool)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        attended = (weights / weights.sum(-1, keepdims=True)) @ v
        x = x + attended.transpose(1, 0, 2).reshape(n, -1) @ w[p + "attn_output"].T
        h = norm(x, w[p + "ffn_norm"])
        gate = h @ w[p + "ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w[p + "ffn_up"].T)) @ w[p + "ffn_down"].T
    return norm(x, w["output_norm"]) @ w["output"].T


def random_prompt(rng: np.random.Generator, length: int) -> list[int]:
    return rng.integers(3, len(TOKENS), length).tolist()


def same_tokens(expected: RequestOutput, got: RequestOutput) -> int:
    """Assert equal greedy tokens up to the first step at which `expected` was a toss-up; return how many were compared."""
    gaps = expected.logit_gaps
    certain = next((i for i, gap in enumerate(gaps) if gap < TIE_EPSILON), len(gaps))
    assert got.token_ids[:certain] == expected.token_ids[:certain]
    if certain == len(gaps):
        assert got.token_ids == expected.token_ids
        assert got.text == expected.text
        assert got.finish_reason == expected.finish_reason
    return certain
