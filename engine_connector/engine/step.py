"""What one step computes, as the scheduler settled it and the runner does it."""

from dataclasses import dataclass

from kvstore.engine_connector.engine.sequence import Sequence
from kvstore.engine_connector.protocol import ConnectorMetadata


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """A sequence's share of a step: it computes the tokens [start, start + num_tokens)."""

    sequence: Sequence
    start: int
    num_tokens: int
    loading: bool = False  # tokens before `start` arrive meanwhile, layer by layer; if they do not, the share is void

    @property
    def end(self) -> int:
        """First token after the share."""
        return self.start + self.num_tokens

    @property
    def num_samples(self) -> int:
        """How many next tokens its last logits give: 0 unless the share ends with the sequence's last token, else 1, or the
        request's n at the end of the prompt."""
        return self.sequence.num_samples if self.end == self.sequence.num_tokens else 0


@dataclass(frozen=True, slots=True)
class Step:
    """What to compute: prefill chunks each on its own, decodes together; and what to tell the connector's worker side."""

    chunks: tuple[ScheduledSequence, ...]
    decodes: tuple[ScheduledSequence, ...]
    meta: ConnectorMetadata

    @property
    def scheduled(self) -> tuple[ScheduledSequence, ...]:
        """Decodes, then chunks."""
        return self.decodes + self.chunks
