"""What LLM refuses before it starts: settings, prompts and ids that cannot work, each named with what would be right."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from kvstore.core.errors import ConfigError
from kvstore.core.keys import QUANTISATIONS
from kvstore.engine_connector.engine.output_text import OutputText
from kvstore.engine_connector.engine.sampler import SamplingParams
from kvstore.kernels.paged import TORCH_DTYPES

MAX_REQUEST_ID_BYTES = 200
"""The wire takes 256 (core/limits.py); the engine and a connector may append to an id which sample or blocks it speaks of."""

DEVICES = ("cpu", "cuda")

_HIGHEST = {
    "num_pages": 1 << 31,
    "block_tokens": 4096,
    "max_batch": 4096,
    "chunk_tokens": 1 << 20,
    "max_waiting": 1 << 20,
    "num_threads": 1024,
}
"""Far beyond what runs well: these catch a wrong unit."""


@dataclass(frozen=True, slots=True)
class LengthLimit:
    """The most tokens that a request may have before it gets its last one, and what sets that."""

    tokens: int
    reason: str


def length_limit(context: int, num_pages: int, block_tokens: int, wanted: int | None) -> LengthLimit:
    """The least of what the model, the pages and the caller (`wanted`, max_model_len) allow."""
    if wanted is not None and not 1 <= wanted <= context:
        raise ConfigError(
            f"max_model_len: {wanted} is out of range; use 1 to the model's context of {context}",
            field="max_model_len",
            value=wanted,
        )
    limits = [
        LengthLimit(context, f"the model's context of {context}"),
        LengthLimit(num_pages * block_tokens, f"the {num_pages * block_tokens} that all {num_pages} pages hold"),
    ]
    if wanted is not None:
        limits.append(LengthLimit(wanted, f"max_model_len {wanted}"))
    return min(limits, key=lambda limit: limit.tokens)


def check_numbers(**settings: int) -> None:
    """Each by its name."""
    for name, value in settings.items():
        if not 1 <= value <= _HIGHEST[name]:
            raise ConfigError(f"{name}: {value} is out of range; use 1 to {_HIGHEST[name]}", field=name, value=value)


def check_request_id(request_id: str) -> None:
    """Ids travel, and name requests in logs."""
    if not isinstance(request_id, str):
        raise ConfigError(
            f"request_id: {request_id!r:.40} is no text; use 1 to {MAX_REQUEST_ID_BYTES} bytes of UTF-8",
            field="request_id",
            value=repr(request_id)[:40],
        )
    try:
        nbytes = len(request_id.encode())
    except UnicodeEncodeError:
        wrong = "is no UTF-8"
    else:
        if 1 <= nbytes <= MAX_REQUEST_ID_BYTES:
            return
        wrong = f"has {nbytes} bytes"
    shown = ascii(request_id[:40])
    raise ConfigError(
        f"request_id: {shown} {wrong}; use 1 to {MAX_REQUEST_ID_BYTES} bytes of UTF-8", field="request_id", value=shown
    )


def check_chunks(chunk_tokens: int, block_tokens: int) -> None:
    """A chunk ends with a block."""
    if chunk_tokens % block_tokens:
        raise ConfigError(
            f"chunk_tokens: {chunk_tokens} is not a multiple of block_tokens {block_tokens}",
            field="chunk_tokens",
            value=chunk_tokens,
        )


def check_dtype(kv_dtype: str) -> None:
    """The pages' type."""
    if kv_dtype not in TORCH_DTYPES:
        known = ", ".join(TORCH_DTYPES)
        raise ConfigError(f"kv_dtype: {kv_dtype!r} is not known; use one of {known}", field="kv_dtype", value=kv_dtype)


def check_stored_format(stored_format: str) -> None:
    """How a store keeps the pages' numbers."""
    known = ("same", *QUANTISATIONS)
    if stored_format not in known:
        raise ConfigError(
            f"stored_format: {stored_format!r} is not known; use {', '.join(known)}",
            field="stored_format",
            value=stored_format,
        )


def check_device(device: str, kv_dtype: str) -> None:
    """Where weights and pages are."""
    right = None
    if device not in DEVICES:
        right = f"use one of {', '.join(DEVICES)}"
    elif device == "cuda" and not torch.cuda.is_available():
        right = "this torch finds no GPU; use cpu"
    elif device == "cuda" and find_spec("triton") is None:
        right = "attention there needs triton: install kvstore-tiered[gpu], or use cpu"
    elif device == "cuda" and kv_dtype == "float32":
        right = "pages there have 16 bits; use kv_dtype float16 or bfloat16"
    if right is not None:
        raise ConfigError(f"device: {device!r}: {right}", field="device", value=device)


def check_head_dim(device: str, head_dim: int) -> None:
    """What the kernels can do (kernels/triton_attention.py)."""
    if device == "cpu":
        return
    from kvstore.kernels.triton_attention import HEAD_DIMS

    if head_dim not in HEAD_DIMS:
        raise ConfigError(
            f"device: {device!r} runs models with a head_dim of {HEAD_DIMS}; this one has {head_dim}: use cpu",
            field="device",
            value=device,
        )


def check_prompt(token_ids: Sequence[int], limit: LengthLimit, vocab_size: int) -> None:
    """Empty, too long, or with tokens that the model does not have."""
    if len(token_ids) == 0:
        raise ConfigError("prompt: empty; give at least one token", field="prompt", value=0)
    check_prompt_length(len(token_ids), limit)
    check_token_types("prompt", token_ids)
    bad = next((i for i in token_ids if not 0 <= i < vocab_size), None)
    if bad is not None:
        raise ConfigError(
            f"prompt: token id {bad} is out of range; use 0 to {vocab_size - 1}", field="prompt", value=bad
        )


def token_list(field: str, given: object) -> list[int]:
    """What a caller gives as token ids: anything that lists whole numbers."""
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise ConfigError(
            f"{field}: {given!r:.40} is no list of token ids; use whole numbers", field=field, value=repr(given)[:40]
        )
    return list(given)


def check_token_types(field: str, token_ids: Sequence[int]) -> None:
    """Whole numbers, numpy's too. A few types whatever the length, so that a long prompt costs no call for each token."""
    for kind in set(map(type, token_ids)):
        if kind is bool or not hasattr(kind, "__index__"):
            index, bad = next((i, token) for i, token in enumerate(token_ids) if type(token) is kind)
            raise ConfigError(
                f"{field}: {bad!r:.40} at {index} is no token id; use whole numbers", field=field, value=repr(bad)[:40]
            )


def check_prompt_length(num_tokens: int, limit: LengthLimit) -> None:
    """Of the prompt, with the tokens of its answer that came with it."""
    if num_tokens > limit.tokens:
        raise ConfigError(f"prompt: {num_tokens} tokens are more than {limit.reason}", field="prompt", value=num_tokens)


def check_least_tokens(num_tokens: int, limit: LengthLimit) -> None:
    """Of a text that is not encoded yet."""
    if num_tokens > limit.tokens:
        raise ConfigError(
            f"prompt: a text of at least {num_tokens} tokens; they are more than {limit.reason}",
            field="prompt",
            value=num_tokens,
        )


def check_first_tokens(
    token_ids: Sequence[int], vocab_size: int, stop_ids: frozenset[int], n: int, max_tokens: int
) -> None:
    """The beginning of an answer that another instance generated: of one sample, of which something is left to generate."""
    check_token_types("first_token_ids", token_ids)
    bad = next((i for i in token_ids if not 0 <= i < vocab_size), None)
    if bad is not None:
        problem, value = f"token id {bad} is out of range; use 0 to {vocab_size - 1}", bad
    elif n != 1:
        problem, value = f"given for n = {n} samples; give them for one", n
    elif len(token_ids) >= max_tokens:
        problem = f"{len(token_ids)} tokens leave nothing to generate; give fewer than max_tokens {max_tokens}"
        value = len(token_ids)
    elif ended := stop_ids.intersection(token_ids):
        value = min(ended)
        problem = f"token id {value} ends the answer; there is nothing to take over"
    else:
        return
    raise ConfigError(f"first_token_ids: {problem}", field="first_token_ids", value=value)


def check_not_stopped(text: OutputText, num_first: int) -> None:
    """Before it begins: the text is that of first_token_ids."""
    if text.stopped:
        raise ConfigError(
            "first_token_ids: their text has a stop string; there is nothing to take over",
            field="first_token_ids",
            value=num_first,
        )


def check_samples(n: int, max_batch: int) -> None:
    """All samples of a request are computed side by side, so that the prompt is computed once."""
    if n > max_batch:
        raise ConfigError(f"n: {n} is out of range; use 1 to max_batch {max_batch}", field="n", value=n)


def params_for(
    prompts: Sequence[str | Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    """One for each prompt."""
    if isinstance(prompts, str):
        raise ConfigError("prompts: a single text; give a list of prompts", field="prompts", value=prompts[:40])
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    if len(params) != len(prompts):
        raise ConfigError(
            f"params: {len(params)} for {len(prompts)} prompts; give one for all or one each",
            field="params",
            value=len(params),
        )
    return list(params)
