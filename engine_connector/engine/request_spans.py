"""The engine's part of a request's trace: the whole of it, its prefill, its samples' decoding.

(the client's span, from the request's traceparent)
  +- llm_request      from add_request until the last sample has ended; what the connector does is below it
       +- prefill     from the first chunk until the first token
       +- decode      from the first token until a sample ends
"""

from collections.abc import Iterable

from kvstore.core.traces import Span, Tracer
from kvstore.engine_connector.engine.sequence import Sequence
from kvstore.engine_connector.engine.step import Step


class RequestSpans:
    """Owns the spans of live requests. The engine's thread only; `now_s` is on the engine's clock."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._open: dict[str, Span] = {}  # by request, of those that are traced

    def begin(self, sequence: Sequence, above: str) -> None:
        """A request came; from now on the sequence knows its span."""
        span = self._tracer.start("llm_request", above, at_s=sequence.arrival_s, kind="server")
        sequence.traceparent = span.traceparent
        if span.traceparent:
            self._open[sequence.group_id] = span

    def scheduled(self, step: Step, now_s: float) -> None:
        """A step begins."""
        for share in step.scheduled:
            if share.sequence.started_s is None:
                share.sequence.started_s = now_s

    def first_token(self, sequence: Sequence, now_s: float) -> None:
        """The prompt is computed. Samples that fork off it have no prefill of their own."""
        if not sequence.traceparent or sequence.index:
            return
        counts = sequence.counts
        self._tracer.start("prefill", sequence.traceparent, at_s=sequence.started_s).end(
            {
                "kvstore.tokens.computed": counts.prefilled,
                "kvstore.tokens.on_engine": counts.local_cached,
                "kvstore.tokens.fetched": counts.fetched,
                "kvstore.tokens.front": counts.filled_front,
                "kvstore.tokens.back": counts.filled_back,
                "kvstore.preemptions": counts.preemptions,
            },
            at_s=now_s,
        )

    def sample_ended(self, sequence: Sequence, now_s: float) -> None:
        """With or without a token."""
        if sequence.traceparent and sequence.first_token_s is not None:
            self._tracer.start("decode", sequence.traceparent, at_s=sequence.first_token_s).end(
                {"kvstore.sample": sequence.index, "gen_ai.usage.output_tokens": sequence.num_output_tokens}, at_s=now_s
            )

    def ended(self, request_id: str, samples: Iterable[Sequence], now_s: float) -> None:
        """Its last sample has."""
        span = self._open.pop(request_id, None)
        if span is None:
            return
        samples = list(samples)
        first = samples[0]
        reasons = sorted({str(each.finish_reason) for each in samples})
        ttft = (
            {}
            if first.first_token_s is None
            else {"gen_ai.latency.time_to_first_token": first.first_token_s - first.arrival_s}
        )
        span.end(
            {
                "gen_ai.request.id": request_id,
                "gen_ai.usage.input_tokens": first.num_prompt_tokens,
                "gen_ai.usage.output_tokens": sum(each.num_output_tokens for each in samples),
                "gen_ai.response.finish_reasons": ",".join(reasons),
                **ttft,
            },
            at_s=now_s,
        )
