"""What does it cost to store KV blocks in half the bytes? Perplexity of a text, read in chunks, each by an engine that takes
everything before it from the store.

    chunk 0   computed, saved                       the store gets what was computed ...
    chunk 1   chunk 0 loaded, computed, saved       ... from what it gave: errors add up, as over the turns of a chat
    chunk n   chunks 0 to n - 1 loaded, computed: each of its tokens is predicted, and scored

Every loaded token has been through the store's format once, and nothing stays in the engine's own pages. The text is the
repository's ARCHITECTURE.md, which the model has not seen; its digest is in the report.
"""

import math
import uuid
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import torch
import xxhash

from benchmarks.harness import Report, Row, Samples, at_least, at_most, interleave, machine_card, millis, show
from benchmarks.sidecar import running_sidecar
from kvstore.client import Client
from kvstore.core.clock import MonotonicClock
from kvstore.core.keys import QUANTISATIONS, KVSpec
from kvstore.core.limits import SEGMENT_BYTES, SLOT_ALIGN_BYTES
from kvstore.engine_connector.engine.device import block_copies
from kvstore.engine_connector.engine.llm import LLM
from kvstore.engine_connector.engine.sampler import SamplingParams
from kvstore.engine_connector.protocol import Connector, FetchPolicy
from kvstore.engine_connector.scheduler_side import StoreSchedulerSide
from kvstore.engine_connector.session import StoreSession
from kvstore.engine_connector.worker_side import StoreWorkerSide
from kvstore.models import find_model
from kvstore.proto.kvstore_pb2 import BOTH

QUESTION = "Perplexity with the context from the store, by stored format"
TEXT = Path(__file__).parent.parent / "ARCHITECTURE.md"
GOAL_PERCENT = 1.0
"""Above the perplexity with the pages' own numbers, at most."""

MIN_BLOCKS = 1.9
"""Blocks in a GiB, of those with the pages' own numbers: slots end at multiples of 4 KiB."""

_PATIENT_S = 60.0
_NEXT = SamplingParams(max_tokens=1, ignore_eos=True)


class _Case(NamedTuple):
    """How a text was read."""

    nats: float  # a token, of those whose context came from the store
    num_scored: int
    num_fetched: int
    block_nbytes: int
    copy_out: Samples  # of one block
    copy_in: Samples


class _Scored:
    """A model that keeps what each token of `text` cost, given all before it, as it comes by."""

    def __init__(self, model: Any, text: list[int]) -> None:
        self._model = model
        self._text = torch.tensor(text)
        self.nats: dict[int, float] = {}  # by position

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Any) -> torch.Tensor:
        hidden: torch.Tensor = self._model.hidden(token_ids, positions, attention)
        first = int(positions[0])
        rows = positions == torch.arange(first, first + len(positions))  # the others are padding
        rows &= positions + 1 < len(self._text)
        logprobs = torch.log_softmax(self._model.logits(hidden[rows]), dim=-1)
        targets = positions[rows] + 1
        nats = -logprobs.gather(1, self._text[targets][:, None])[:, 0]
        self.nats |= dict(zip(targets.tolist(), nats.tolist(), strict=True))
        return hidden


def run(
    *,
    model: Path | None = None,
    num_tokens: int = 5632,
    chunk_tokens: int = 512,
    kv_dtype: str = "bfloat16",
    arena_mib: int = 384,
    **settings: Any,
) -> Report:
    path = find_model(None) if model is None else model
    words = TEXT.read_text()
    cases = {
        stored_format: _read(
            path, words, stored_format, num_tokens, chunk_tokens, arena_mib << 20, kv_dtype=kv_dtype, **settings
        )
        for stored_format in ("same", *QUANTISATIONS)
    }
    same = cases["same"]
    return Report(
        question=QUESTION,
        command="python -m benchmarks.kv_quality",
        rows=[_row(name if name != "same" else kv_dtype, case, same) for name, case in cases.items()],
        goals=[
            at_most(f"perplexity, {name} above {kv_dtype}, percent", _percent_above(cases[name], same), GOAL_PERCENT)
            for name in QUANTISATIONS
        ]
        + [
            at_least(
                f"blocks in a GiB, {name} / {kv_dtype}", round(_per_gib(cases[name]) / _per_gib(same), 3), MIN_BLOCKS
            )
            for name in QUANTISATIONS
        ],
        remarks=[
            f"text: the first {num_tokens} tokens of ARCHITECTURE.md, xxh3 {xxhash.xxh3_64_hexdigest(words.encode())}",
            f"each {chunk_tokens} tokens by an engine that has loaded all before them; pages {kv_dtype}, blocks of 16 tokens",
            "copies are of one block, on one thread, on the host",
        ],
    )


def _read(
    path: Path, words: str, stored_format: str, num_tokens: int, chunk_tokens: int, arena_nbytes: int, **settings: Any
) -> _Case:
    with running_sidecar(arena_nbytes) as socket, _open(path, socket, stored_format, chunk_tokens, settings) as llm:
        text = llm.tokenizer.encode(words)[: num_tokens + 1]
        assert len(text) == num_tokens + 1, "the text is too short"
        scored = _Scored(llm._runner._model, text)  # noqa: SLF001 (no engine tells the cost of a prompt's tokens)
        llm._runner._model = scored  # type: ignore[assignment]  # noqa: SLF001
        num_fetched = 0
        for start in range(0, num_tokens, chunk_tokens):
            (output,) = llm.generate([text[: start + chunk_tokens + 1]], _NEXT)
            assert output.num_fetched_tokens == start, output
            num_fetched += start
            if not start:
                scored.nats.clear()
        assert sorted(scored.nats) == list(range(chunk_tokens + 1, num_tokens + 1)), "each token once"
        copies = block_copies(llm._runner._pages, llm.spec.quantisation)  # noqa: SLF001
        block = np.zeros(copies.page_nbytes, np.uint8)
        copied = interleave(
            {"out": lambda: copies.copy_out(1, block), "in": lambda: copies.copy_in(0, block)}, rounds=100, warm_up=5
        )
        nats = list(scored.nats.values())
        return _Case(sum(nats) / len(nats), len(nats), num_fetched, llm.spec.block_nbytes, copied["out"], copied["in"])


def _open(path: Path, socket: Path, stored_format: str, chunk_tokens: int, settings: dict[str, Any]) -> LLM:
    return LLM(
        path,
        connector_factory=lambda spec: _connect(spec, socket),
        stored_format=stored_format,
        chunk_tokens=chunk_tokens,
        prefix_caching=False,
        **settings,
    )


def _connect(spec: KVSpec, socket: Path) -> Connector:
    """As local.open_connector, but patient: every token is to be fetched, however busy the machine is."""
    client = Client(str(socket), instance=uuid.uuid4().bytes, role=BOTH, specs=[spec], call_deadline_s=_PATIENT_S)
    session = StoreSession(client)
    session.start()
    scheduler = StoreSchedulerSide(
        session,
        block_tokens=spec.block_tokens,
        clock=MonotonicClock(),
        fetch=FetchPolicy.ALWAYS,
        load_deadline_s=_PATIENT_S,
    )
    return Connector(scheduler, StoreWorkerSide(session))


def _perplexity(case: _Case) -> float:
    return math.exp(case.nats)


def _percent_above(case: _Case, same: _Case) -> float:
    return round(100 * (_perplexity(case) / _perplexity(same) - 1), 3)


def _per_gib(case: _Case) -> int:
    """Blocks in an arena of a GiB."""
    slot_nbytes = -(-case.block_nbytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES
    return (SEGMENT_BYTES // slot_nbytes) * ((1 << 30) // SEGMENT_BYTES)


def _row(name: str, case: _Case, same: _Case) -> Row:
    return {
        "stored": name,
        "perplexity": round(_perplexity(case), 4),
        "above_lossless_percent": _percent_above(case, same),
        "tokens_scored": case.num_scored,
        "tokens_fetched": case.num_fetched,
        "block_bytes": case.block_nbytes,
        "blocks_per_gib": _per_gib(case),
        "copy_out_p50_ms": millis(case.copy_out.median_s),
        "copy_out_p99_ms": millis(case.copy_out.p99_s),
        "copy_in_p50_ms": millis(case.copy_in.median_s),
        "copy_in_p99_ms": millis(case.copy_in.p99_s),
        "n": len(case.copy_in),
    }


@click.command()
@click.option("--model", type=click.Path(path_type=Path), default=None)
@click.option("--num-tokens", default=5632, show_default=True, help="A multiple of the chunk.")
@click.option("--chunk-tokens", default=512, show_default=True)
@click.option("--kv-dtype", default="bfloat16", show_default=True, help="Of the pages.")
@click.option("--arena-mib", default=384, show_default=True, help="For the whole text in the pages' own numbers.")
@click.option("--num-threads", default=None, type=int, help="Of the forward; as many as there are cores if not given.")
@click.option("--json", "as_json", is_flag=True)
def main(*, as_json: bool, **sizes: Any) -> None:
    card = machine_card()
    show(run(**sizes), card, as_json=as_json)


if __name__ == "__main__":
    main()
