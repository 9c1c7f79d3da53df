"""Finding a row by what people call it: other names, and the nearest names when there is none."""

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

from kvstore.core.errors import ConfigError

Row = TypeVar("Row")

MODEL_ALIASES = {
    "QwQ-32B": "Qwen2.5-32B",
    "R1-Distill-Qwen-32B": "Qwen2.5-32B",
    "DeepSeek-R1-Distill-Qwen-32B": "Qwen2.5-32B",
    "LLaMA3-70B": "Llama-3.1-70B",
    "LLaMA3-70B(dummy)": "Llama-3.1-70B",
    "Llama-3-70B": "Llama-3.1-70B",
    "Llama-3.3-70B": "Llama-3.1-70B",
    "R1-Distill-Llama-70B": "Llama-3.1-70B",
    "DeepSeek-R1-Distill-Llama-70B": "Llama-3.1-70B",
    "Llama-3-8B": "Llama-3.1-8B",
    "Meta-Llama-3.1-8B": "Llama-3.1-8B",
    "Meta-Llama-3.1-70B": "Llama-3.1-70B",
    "R1-Distill-Llama-8B": "Llama-3.1-8B",
    "DeepSeek-R1-Distill-Llama-8B": "Llama-3.1-8B",
    "DeepSeek-R1-AWQ": "DeepSeek-R1",
    "DeepSeek-R1-0528": "DeepSeek-R1",
    "DeepSeek-V3.1": "DeepSeek-V3",
    "DeepSeek-V3-0324": "DeepSeek-V3",
    "Mistral-7B": "Mistral-7B-v0.2+",
    "Mistral-7B-v0.2": "Mistral-7B-v0.2+",
    "Mistral-7B-v0.3": "Mistral-7B-v0.2+",
    "Phi-4": "Phi-4-14B",
}
"""Other name -> name in models.csv: the same shape under another name, or with weights of fewer bits."""

GPU_ALIASES = {
    "A100": "A100-80 SXM",
    "A100-80": "A100-80 SXM",
    "A100-40": "A100-40 SXM",
    "A800": "A100-80 SXM",
    "A800 SXM": "A100-80 SXM",
    "H100": "H100 SXM",
    "H800": "H800 SXM",
    "H200": "H200 SXM",
    "H20-3e": "H20",
    "B200": "B200 SXM",
    "B300": "B300 SXM",
    "GB200": "GB200 (per GPU)",
    "A6000": "RTX A6000",
    "4090": "RTX 4090",
}
"""Other name -> name in hardware.csv."""

_SUFFIXES = ("instruct", "chat", "base", "it", "hf", "bf16", "fp8", "awq", "gptq")
_NEAREST = 4


def simple(name: str) -> str:
    """What of a name is compared: no owner (a word and a slash), no case, no spaces, dashes and underscores. "400G NDR/RoCE"
    has no owner: what stands before its slash is two words."""
    return re.sub(r"[\s_\-]+", "", re.sub(r"^[\w.\-]+/(?=\S)", "", name).lower())


def without_suffixes(name: str) -> str:
    """A model's name without the parts that do not change its shape: -Instruct, -chat, -AWQ."""
    parts = re.split(r"[\s_\-]+", name)
    while len(parts) > 1 and parts[-1].lower() in _SUFFIXES:
        parts.pop()
    return "-".join(parts)


def find(rows: Mapping[str, Row], name: str, aliases: Mapping[str, str], *, field: str) -> Row:
    """The row of that name. Raises ConfigError with the nearest known names."""
    by_simple = {simple(alias): rows[target] for alias, target in aliases.items()}
    by_simple |= {simple(known): row for known, row in rows.items()}
    for asked in (name, without_suffixes(name)):
        if simple(asked) in by_simple:
            return by_simple[simple(asked)]
    near = nearest(name, [*rows, *aliases])
    raise ConfigError(
        f"{field}: {name!r} is not known; the nearest names are {', '.join(near)}", field=field, value=name
    )


def nearest(name: str, known: Sequence[str]) -> list[str]:
    """The known names that look most like it; all of a few."""
    by_simple = {simple(entry): entry for entry in known}
    close = difflib.get_close_matches(simple(name), by_simple, n=_NEAREST, cutoff=0.0)
    return [by_simple[entry] for entry in close]
