"""What the command line says, checked: text in, values out. Every refusal names the option, its value and what would be right."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvstore.bench import arrivals as arrival
from kvstore.bench import workload as make
from kvstore.bench.arrivals import Arrivals
from kvstore.bench.measures import Slo
from kvstore.bench.plan import Target
from kvstore.bench.trace import read_trace
from kvstore.bench.workload import MAX_REQUESTS, Lengths, Span, Workload
from kvstore.core.errors import ConfigError
from kvstore.replay.trace import BLOCK_TOKENS

MAX_TOKENS = 10_000_000
"""Of one length; longer than any model's context."""

SLO_NAMES = ("ttft", "tpot", "itl", "e2e")
_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3}

WORKLOADS: dict[str, dict[str, Any]] = {
    "random": {"requests": 100, "input_tokens": "512", "output_tokens": "64"},
    "shared-system": {"requests": 100, "system_tokens": 1024, "input_tokens": "128", "output_tokens": "64"},
    "multi-turn": {
        "conversations": 8,
        "turns": 4,
        "system_tokens": 0,
        "input_tokens": "128",
        "output_tokens": "64",
        "think_s": 0.0,
    },
    "document-qa": {
        "documents": 4,
        "document_tokens": 2048,
        "questions": 4,
        "input_tokens": "32",
        "output_tokens": "32",
    },
    "trace": {"trace": None, "requests": MAX_REQUESTS, "trace_block_tokens": BLOCK_TOKENS, "time_scale": 1.0},
}
"""Workload -> its options and their defaults; an option of another workload is refused, not ignored."""

ARRIVALS: dict[str, dict[str, Any]] = {
    "poisson": {"rate": 1.0},
    "burst": {"burst_size": 0, "rate": 0.0},
    "closed": {"concurrency": 4},
    "trace": {},
}
"""Likewise."""


def refuse(option: str, value: object, right: str) -> ConfigError:
    """For raising."""
    return ConfigError(f"--{option}: {value}; use {right}", field=option, value=str(value))


def parse_span(option: str, text: str) -> Span:
    """`512` or `128-2048`."""
    found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text, re.ASCII)
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= low <= high <= MAX_TOKENS:
        raise refuse(option, repr(text), "a number of tokens, or a range such as 128-2048 (1 to 10,000,000)")
    return Span(low, high)


def parse_token_ids(text: str) -> Span:
    """`1000-30000`; 0 is an id too."""
    found = re.fullmatch(r"(\d{1,9})-(\d{1,9})", text, re.ASCII)
    if not found or int(found[1]) > int(found[2]):
        raise refuse("token-ids", repr(text), "a range of token ids without control tokens, such as 1000-30000")
    return Span(int(found[1]), int(found[2]))


def parse_slo(text: str) -> Slo:
    """`ttft=500ms,tpot=0.05`; seconds unless a unit says otherwise."""
    right = "name=seconds, separated by commas, such as ttft=0.5,tpot=50ms; names are " + ", ".join(SLO_NAMES)
    slo: Slo = {}
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\w+)\s*=\s*(\d+(?:\.\d*)?|\.\d+)(s|ms|)\s*", part, re.ASCII)
        if not found or found[1] not in SLO_NAMES or found[1] in slo or float(found[2]) <= 0:
            raise refuse("slo", repr(part), right)
        slo[found[1]] = float(found[2]) * _UNITS[found[3]]
    return slo


def parse_object(option: str, text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except ValueError as err:
        raise refuse(
            option, f"{text!r} is not JSON ({err})", """an object, such as '{"kvstore": {"no_read": true}}'"""
        ) from err
    if not isinstance(value, dict):
        raise refuse(option, repr(text), """a JSON object, such as '{"kvstore": {"no_read": true}}'""")
    return value


def parse_targets(
    urls: Sequence[str], compare: str | None, extra: Mapping[str, Any], compare_extra: Mapping[str, Any] | None
) -> tuple[Target, ...]:
    """One or two of `URL` or `LABEL=URL`. Two may differ in one thing: the address, or with `compare_extra` the body fields."""
    right = "one --url, or two of them, or one and --compare"
    given = [*urls, *([compare] if compare else [])]
    if not given:
        raise refuse("url", "absent", right)
    if compare_extra is not None and len(given) == 1:
        given *= 2  # the same server, asked in two ways
    elif compare_extra is not None:
        raise refuse(
            "compare-body", "given with two servers", "one variable at a time: either another URL or other fields"
        )
    if len(given) > 2:
        raise refuse("url", f"{len(given)} servers", right)
    named = [_label_and_url(text, default) for text, default in zip(given, "AB", strict=False)]
    if compare_extra is not None:
        named = [("A", named[0][1]), ("B", named[1][1])]
    if len({label for label, _ in named}) < len(named):
        raise refuse("url", f"label {named[0][0]!r} twice", "another label for each")
    extras = [extra, extra if compare_extra is None else compare_extra]
    return tuple(Target(label, url, dict(fields)) for (label, url), fields in zip(named, extras, strict=False))


def _label_and_url(text: str, default: str) -> tuple[str, str]:
    found = re.fullmatch(r"(?:([^=/:]+)=)?(https?://.+)", text)
    right = "http://HOST:PORT or LABEL=http://HOST:PORT"
    if not found:
        raise refuse("url", repr(text), right)
    try:
        parts = urlsplit(found[2])
        usable = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment:
        raise refuse("url", repr(text), right)
    address = found[2].rstrip("/")
    return found[1] or default, address if address.endswith("/v1") else address + "/v1"


def take(kind: str, name: str, table: Mapping[str, Mapping[str, Any]], given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `name`, from `given` where they are not None, else its defaults. Raises ConfigError for one of another's."""
    if name not in table:
        raise refuse(kind, repr(name), ", ".join(table))
    for option, value in given.items():
        if value is not None and option not in table[name]:
            owners = " or ".join(owner for owner, options in table.items() if option in options)
            flag = option.replace("_", "-")
            raise refuse(flag, f"{value} is of no use with --{kind} {name}", f"--{kind} {owners}, or leave it out")
    return {option: default if given.get(option) is None else given[option] for option, default in table[name].items()}


def make_workload(name: str, seed: int, given: Mapping[str, Any]) -> Workload:
    """From the options of WORKLOADS."""
    options = take("workload", name, WORKLOADS, given)
    if name == "trace":
        if options["trace"] is None:
            raise refuse("trace", "absent", "a file in Mooncake's format with --workload trace")
        return read_trace(
            Path(options["trace"]),
            seed=seed,
            limit=options["requests"],
            block_tokens=options["trace_block_tokens"],
            time_scale=options["time_scale"],
        )
    spans = [parse_span(field.replace("_", "-"), options.pop(field)) for field in ("input_tokens", "output_tokens")]
    if name == "shared-system" and options["system_tokens"] == 0:
        raise refuse("system-tokens", 0, "1 or more with --workload shared-system")
    makers: dict[str, Callable[..., Workload]] = {
        "random": make.random_prompts,
        "shared-system": make.shared_system,
        "multi-turn": make.multi_turn,
        "document-qa": make.document_qa,
    }
    return makers[name](seed, lengths=Lengths(*spans), **options)


def make_arrivals(name: str | None, workload: Workload, given: Mapping[str, Any]) -> Arrivals:
    """From the options of ARRIVALS. Without a name: the trace's times for a trace, Poisson for a rate, else a closed loop."""
    if name is None:
        name = "trace" if workload.offsets_s and not any(given.values()) else "closed"
        name = "poisson" if given.get("rate") else name
    options = take("arrival", name, ARRIVALS, given)
    count = len(workload.conversations)
    if name == "poisson":
        return arrival.poisson(workload.seed, count, options["rate"])
    if name == "burst":
        if options["rate"] > 0 and options["burst_size"] == 0:
            raise refuse(
                "rate",
                f"{options['rate']:g} without --burst-size",
                "both for bursts of that size, or neither for one of all",
            )
        if options["burst_size"] > 0 and options["rate"] == 0:
            raise refuse(
                "burst-size",
                f"{options['burst_size']} without --rate",
                "both for bursts at that rate, or neither for one of all",
            )
        return arrival.burst(count, size=options["burst_size"], rate_per_s=options["rate"])
    if name == "closed":
        return arrival.closed(options["concurrency"])
    if not workload.offsets_s:
        raise refuse("arrival", "trace", f"another one: {workload.name} has no times of its own")
    return arrival.from_trace(workload.offsets_s)
