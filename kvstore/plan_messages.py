"""Plans and measurements as messages: what an engine sends, checked, and what Explain tells."""

import numpy as np

from kvstore.advisor import PrefillSample
from kvstore.core.limits import MAX_DURATION_S, MAX_PREFILL_SAMPLES, MAX_PROMPT_TOKENS
from kvstore.core.plans import TIERS, MatchWish
from kvstore.field_checks import check_duration, check_first_needed, check_label, check_request_id, wrong
from kvstore.plan_log import PlanRecord, TierShare
from kvstore.proto import kvstore_pb2 as pb

_SAMPLE_NBYTES = 8 * len(PrefillSample._fields)

_STEP_S = (1e-9, MAX_DURATION_S)
"""The shortest and the longest time that anybody can have measured; what computers make of others is not a speed."""


def read_wish(wish: pb.PlanWish, num_keys: int) -> MatchWish:
    """The wish of a Match with so many keys."""
    for field in ("compute_wait_s", "compute_price", "deadline_s"):
        check_duration(f"wish.{field}", getattr(wish, field))
    check_request_id(wish.request_id, "wish.request_id")
    check_label(wish.label, "wish.label")
    check_first_needed(wish.first_needed, num_keys, "wish.first_needed")
    if not 0 < wish.num_tokens <= MAX_PROMPT_TOKENS:
        raise wrong("wish.num_tokens", wish.num_tokens, f"use 1 to {MAX_PROMPT_TOKENS}")
    return MatchWish(*[getattr(wish, field) for field in MatchWish._fields])


def read_samples(packed: bytes) -> list[PrefillSample]:
    """ReportRequest.prefill."""
    if len(packed) % _SAMPLE_NBYTES or len(packed) > MAX_PREFILL_SAMPLES * _SAMPLE_NBYTES:
        raise wrong(
            "prefill", f"{len(packed)} bytes", f"use {_SAMPLE_NBYTES} a step, of at most {MAX_PREFILL_SAMPLES} steps"
        )
    samples = np.frombuffer(packed, "<f8").reshape(-1, len(PrefillSample._fields))
    if not (np.isfinite(samples).all() and (samples > 0).all()):
        raise wrong("prefill", "a number", "tokens, pairs and seconds are finite and more than 0")
    tokens, pairs, seconds = samples.T
    if (tokens > MAX_PROMPT_TOKENS).any() or (pairs > tokens * MAX_PROMPT_TOKENS).any():
        most = f"at most {MAX_PROMPT_TOKENS} tokens in a step, and as many pairs to each of them"
        raise wrong("prefill", f"{tokens.max():g} tokens, {pairs.max():g} pairs", most)
    if (seconds < _STEP_S[0]).any() or (seconds > _STEP_S[1]).any():
        raise wrong(
            "prefill", f"{seconds.min():g} to {seconds.max():g} s", f"use {_STEP_S[0]:g} to {_STEP_S[1]:g} s a step"
        )
    return [PrefillSample(*sample) for sample in samples.tolist()]


def check_copy(nbytes: int, seconds: float) -> None:
    """ReportRequest.copy_bytes and copy_s; 0 s: there was no copy."""
    check_duration("copy_s", seconds)
    if nbytes and 0 < seconds < _STEP_S[0]:
        raise wrong("copy_s", seconds, f"use {_STEP_S[0]:g} s or more, or 0: there was no copy")


def outcome_name(outcome: int, num_loaded: int) -> str:
    """PlanRecord.outcome."""
    if outcome == pb.LOADED:
        return "loaded"
    if outcome == pb.CANCELLED:
        return "cancelled"
    return "partly" if num_loaded else "failed"


def record_reply(record: PlanRecord, now_s: float) -> pb.PlanRecord:
    """What Explain tells of a plan."""
    prefill = record.prefill
    return pb.PlanRecord(
        request_id=record.wish.request_id,
        namespace=record.namespace,
        age_s=now_s - record.at_s,
        wish=pb.PlanWish(**record.wish._asdict()),
        block_tokens=record.block_tokens,
        block_bytes=record.block_nbytes,
        num_found=record.num_found,
        tiers=[_share_reply(share) for share in record.tiers],
        plan=pb.Plan(plan_id=record.plan_id, **record.plan._asdict()),
        outcome=record.outcome,
        num_loaded=record.num_loaded,
        actual_s=record.actual_s,
        words=record.words(),
        prefill_a_s=prefill.a_s if prefill else 0.0,
        prefill_b_s=prefill.b_s if prefill else 0.0,
        prefill_t0_s=prefill.t0_s if prefill else 0.0,
    )


def _share_reply(share: TierShare) -> pb.TierShare:
    name, quote = TIERS[share.tier], share.quote
    if quote is None:
        return pb.TierShare(tier=name, num_blocks=share.num_blocks, usable=name == TIERS[0])
    return pb.TierShare(
        tier=name,
        num_blocks=share.num_blocks,
        bytes_per_s=quote.load.bytes_per_s,
        latency_s=quote.load.latency_s,
        queued_bytes=int(quote.queued_bytes),
        usable=True,
    )
