"""Executes steps: owns the pages, runs the model over a step's work, calls the connector's worker side in its order."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from kvstore.engine_connector.engine.attention import LayerMissing
from kvstore.engine_connector.engine.device import block_copies, decode_batch, prefill_chunk
from kvstore.engine_connector.engine.model import Attention, Transformer
from kvstore.engine_connector.engine.product import pad_rows
from kvstore.engine_connector.engine.sampler import SampledToken, SampleSpec, sample
from kvstore.engine_connector.engine.step import ScheduledSequence, Step
from kvstore.engine_connector.protocol import ConnectorMetadata, LayerwiseWorker, SaveJob, WorkerOutput, WorkerSide


class StepResult(NamedTuple):
    """`num_samples` tokens for each share of the step that is not void, in order of `step.scheduled`, and the connector's
    news."""

    sampled: list[SampledToken]
    output: WorkerOutput
    void: frozenset[str] = frozenset()  # requests whose load by layers did not come in time


class _Computed(NamedTuple):
    sampled: list[SampledToken]
    void: frozenset[str]


class Runner:
    """One thread. `pages [num_pages, L, H, T, P, D]` stay in place for the runner's life; it alone writes them, besides
    the connector into pages of requests that wait for their KV."""

    def __init__(
        self,
        model: Transformer,
        pages: torch.Tensor,
        worker: WorkerSide,
        *,
        layerwise: LayerwiseWorker | None = None,
        quantisation: str = "",
    ) -> None:
        """`quantisation`: how the connector stores pages; "": as they are."""
        self._model = model
        self._pages = pages
        self._worker = worker
        self._layerwise = layerwise  # the worker again, or None when nothing is to go by layers
        self._loads_taken_of: ConnectorMetadata | None = None  # the last step whose loads the worker took, and saves
        self._saves_taken_of: ConnectorMetadata | None = None
        self._begun_saves: tuple[SaveJob, ...] = ()  # of the step that is under way; the worker has got them early
        self._void_saves: tuple[SaveJob, ...] = ()  # of the last step; the worker does not get them
        worker.register_pages(block_copies(pages, quantisation))

    @torch.inference_mode()
    def execute(self, step: Step, *, idle_wait_s: float) -> StepResult:
        """Run the step; when it computes nothing, wait up to `idle_wait_s` for news of loads and saves."""
        self._worker.handle_preemptions(step.meta)
        self._worker.start_load(step.meta)
        self._loads_taken_of = step.meta
        self._begun_saves = ()
        if self._layerwise is not None:
            begun = _saves_of_settled(step)
            self._layerwise.begin_saves(begun)
            self._begun_saves = begun
        sampled, void = self._forward(step) if step.scheduled else _Computed([], frozenset())
        self._void_saves = tuple(job for job in step.meta.saves if job.request_id in void)
        self._worker.start_save(_without(step.meta, self._void_saves))
        self._saves_taken_of = step.meta
        output = self._worker.get_output(wait_s=0.0 if step.scheduled else idle_wait_s)
        return StepResult(sampled, _with_failed(output, self._void_saves), void)

    @torch.inference_mode()
    def copy_page(self, source: int, target: int) -> None:
        """See scheduler.CopyPage."""
        self._pages[target] = self._pages[source]

    def report_not_taken(self, meta: ConnectorMetadata) -> WorkerOutput:
        """After `execute` raised: every job that the worker has not got, as failed. The others it reports itself."""
        loads = () if self._loads_taken_of is meta else meta.loads
        saves = self._void_saves
        if self._saves_taken_of is not meta:
            saves = tuple(job for job in meta.saves if job not in self._begun_saves)
            if self._layerwise is not None:
                self._layerwise.drop_saves()
        failed = {move.block_id for job in loads for move in job.moves}
        failed.update(block_id for job in loads for block_id in job.lost_block_ids)
        output = WorkerOutput(
            finished_loading=frozenset(job.request_id for job in loads), failed_block_ids=frozenset(failed)
        )
        return _with_failed(output, saves)

    def _forward(self, step: Step) -> _Computed:
        self._zero_opened_pages(step)
        rows = [self._decode(step.decodes)] if step.decodes else []
        void: set[str] = set()
        for chunk in step.chunks:
            try:
                hidden = self._prefill(chunk)
            except LayerMissing:
                void.add(chunk.sequence.request_id)
                continue
            if chunk.num_samples:
                rows.append(hidden[chunk.num_tokens - 1 : chunk.num_tokens])
        sampling = [s for s in step.scheduled if s.num_samples and s.sequence.request_id not in void]
        return _Computed(self._sample(rows, sampling) if sampling else [], frozenset(void))

    def _sample(self, rows: list[torch.Tensor], sampling: list[ScheduledSequence]) -> list[SampledToken]:
        """Of the last hidden states of shares whose tokens are all computed."""
        logits = self._model.logits(torch.cat(rows)).cpu()  # where a step on a GPU waits for it
        specs = [_specs(share) for share in sampling]
        if any(share.num_samples > 1 for share in sampling):
            logits = logits.repeat_interleave(torch.tensor([len(each) for each in specs]), dim=0)
        return sample(logits, [spec for each in specs for spec in each])

    def _decode(self, decodes: tuple[ScheduledSequence, ...]) -> torch.Tensor:
        """Hidden states `[len(decodes), hidden]`."""
        positions = [share.start for share in decodes]
        tokens = [share.sequence.token_ids[share.start] for share in decodes]
        attention = decode_batch(self._pages, [share.sequence.block_ids for share in decodes], positions)
        attend = self._saving(attention, decodes)
        hidden = self._hidden(torch.tensor(tokens), torch.tensor(positions), attend)
        return hidden[: len(decodes)]

    def _prefill(self, chunk: ScheduledSequence) -> torch.Tensor:
        """Hidden states `[num_tokens or more, hidden]`; rows beyond num_tokens are padding."""
        sequence = chunk.sequence
        tokens = torch.tensor(sequence.token_ids[chunk.start : chunk.end])
        wait = None
        if chunk.loading:
            assert self._layerwise is not None
            wait = partial(self._layerwise.wait_for_layer, sequence.request_id)
        attention = prefill_chunk(self._pages, sequence.block_ids, chunk.start, chunk.end, wait)
        return self._hidden(tokens, torch.arange(chunk.start, chunk.end), self._saving(attention, (chunk,)))

    def _hidden(self, tokens: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """Padded, and on the pages' device."""
        device = self._pages.device
        return self._model.hidden(pad_rows(tokens).to(device), pad_rows(positions).to(device), attention)

    def _saving(self, attention: Attention, shares: tuple[ScheduledSequence, ...]) -> Attention:
        """`attention`, that tells the worker of each layer when blocks of these shares are being saved meanwhile."""
        layerwise = self._layerwise
        saved = {job.request_id for job in self._begun_saves}
        request_ids = [share.sequence.request_id for share in shares if share.sequence.request_id in saved]
        if layerwise is None or not request_ids:
            return attention

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            attended = attention(layer, q, k, v)
            layerwise.layer_computed(request_ids, layer)
            return attended

        return attend

    def _zero_opened_pages(self, step: Step) -> None:
        """Clear pages that the step begins to fill and leaves partly filled.

        Attention reads whole pages and masks what is beyond a sequence's end; left-over bytes there, say of a load that
        failed half-way, could be NaN, and NaN times a masked 0 is NaN.
        """
        block_tokens = self._pages.shape[3]
        opened = [
            share.sequence.block_ids[share.end // block_tokens]
            for share in step.scheduled
            if share.end % block_tokens and share.start <= share.end - share.end % block_tokens
        ]
        if opened:
            self._pages[torch.tensor(opened)] = 0


def _saves_of_settled(step: Step) -> tuple[SaveJob, ...]:
    """Saves of shares that cannot turn out void."""
    loading = {chunk.sequence.request_id for chunk in step.chunks if chunk.loading}
    return tuple(job for job in step.meta.saves if job.request_id not in loading)


def _without(meta: ConnectorMetadata, saves: tuple[SaveJob, ...]) -> ConnectorMetadata:
    return replace(meta, saves=tuple(job for job in meta.saves if job not in saves)) if saves else meta


def _with_failed(output: WorkerOutput, saves: tuple[SaveJob, ...]) -> WorkerOutput:
    """With these saves reported too, as not written."""
    failed = tuple((job.job_id, (False,) * len(job.moves)) for job in saves)
    return replace(output, finished_saving=(*output.finished_saving, *failed))


def _specs(share: ScheduledSequence) -> list[SampleSpec]:
    """One for each next token: of the sequence, or of each sample into which it forks."""
    sequence = share.sequence
    indices = range(share.num_samples) if share.num_samples > 1 else (sequence.index,)
    return [SampleSpec(sequence.params, sequence.num_output_tokens, index) for index in indices]
