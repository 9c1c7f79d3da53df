"""The whole engine under random traffic: whatever comes and goes, each request gets what it would get alone."""

from collections import Counter

import numpy as np
import pytest
from fake_connector import FakeConnector, FakeStore, Temper
from tiny_llama import TIE_EPSILON, random_prompt

from kvstore.engine_connector.engine.admission import QueueFull
from kvstore.engine_connector.engine.llm import LLM
from kvstore.engine_connector.engine.options import RequestOptions
from kvstore.engine_connector.engine.outputs import RequestOutput, TokenDelta
from kvstore.engine_connector.engine.sampler import SamplingParams
from kvstore.engine_connector.engine.sequence import FinishReason
from kvstore.engine_connector.protocol import CacheOptions

NUM_REQUESTS = 24
UNKIND = {"max_load_delay": 5, "max_save_delay": 8, "block_fails": 0.05, "load_loses_tail": 0.2}


class Traffic:
    """Requests with prompts that share beginnings, and everything that a request may ask for."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self.llm = llm
        self.rng = np.random.default_rng(seed)
        self.stems = [random_prompt(self.rng, n) for n in (23, 40)]
        self.asked: dict[str, tuple[list[int], SamplingParams]] = {}
        self.deltas: dict[tuple[str, int], list[TokenDelta]] = {}
        self.aborted: Counter[str] = Counter()
        self.num_refused = 0

    def arrive(self) -> None:
        rng = self.rng
        stem = self.stems[int(rng.integers(2))]
        prompt = stem[: int(rng.integers(1, len(stem) + 1))] + random_prompt(rng, int(rng.integers(0, 6)))
        params = SamplingParams(
            n=int(rng.choice([1, 1, 2, 4])),
            temperature=float(rng.choice([0.0, 0.8])),
            seed=int(rng.integers(1000)),
            max_tokens=int(rng.integers(1, 24)),
            ignore_eos=bool(rng.integers(2)),
            stop=("e", "12") if rng.random() < 0.2 else (),
        )
        options = RequestOptions(
            priority=int(rng.integers(-1, 2)),
            load_failure="fail" if rng.random() < 0.2 else "recompute",
            cache=CacheOptions(salt=str(rng.choice(["", "", "s"])), no_read=bool(rng.random() < 0.1)),
        )
        try:
            request_id = self.llm.add_request(prompt, params, options=options, request_id=f"r{len(self.asked)}")
            self.asked[request_id] = (prompt, params)
        except QueueFull:
            self.num_refused += 1

    def step(self) -> None:
        for delta in self.llm.step():
            self.deltas.setdefault((delta.request_id, delta.index), []).append(delta)
        self.llm.check()

    def abort_one(self) -> None:
        request_id = str(self.rng.choice(sorted(self.asked)))
        self.aborted[request_id] += self.llm.abort(request_id) is not None
        self.llm.check()

    def run(self) -> None:
        while len(self.asked) < NUM_REQUESTS or self.llm.has_unfinished:
            if len(self.asked) < NUM_REQUESTS and self.rng.random() < 0.4:
                self.arrive()
            if self.asked and self.rng.random() < 0.04:
                self.abort_one()
            self.step()
        assert self.llm.drain(5.0)
        self.llm.check()


def alone(llm: LLM, traffic: Traffic) -> dict[tuple[str, int], RequestOutput]:
    return {
        (request_id, output.index): output
        for request_id, (prompt, params) in traffic.asked.items()
        for output in llm.generate([prompt], params)
    }


def num_certain(output: RequestOutput, params: SamplingParams) -> int:
    """Tokens before the first toss-up; of a sampled output all: where rounding decides is one in many thousands."""
    gaps = () if params.temperature else output.logit_gaps
    return next((i for i, gap in enumerate(gaps) if gap < TIE_EPSILON), len(output.token_ids))


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_gives_each_request_what_it_gets_alone(make_llm, seed):
    fake = FakeConnector(FakeStore(), Temper(**UNKIND, seed=seed))
    llm = make_llm(connector_factory=fake.factory, num_pages=28, max_batch=6, max_waiting=5)
    traffic = Traffic(llm, seed)

    traffic.run()

    assert llm.stats().num_free_pages == 28
    assert not fake.pending_jobs
    assert llm.stats().total.preemptions > 0
    num_whole = 0
    for key, expected in alone(make_llm(prefix_caching=False), traffic).items():
        deltas, params = traffic.deltas.get(key, []), traffic.asked[key[0]][1]
        tokens = tuple(delta.token_id for delta in deltas if delta.token_id is not None)
        num_compared = min(num_certain(expected, params), len(tokens))
        assert tokens[:num_compared] == expected.token_ids[:num_compared], key
        output = deltas[-1].output if deltas else None
        if output is None:
            assert traffic.aborted[key[0]], "neither ended nor aborted"
        elif output.finish_reason is not FinishReason.ERROR and num_certain(expected, params) == len(
            expected.token_ids
        ):
            assert output.token_ids == tokens == expected.token_ids
            assert "".join(delta.text for delta in deltas) == output.text == expected.text
            assert output.finish_reason is expected.finish_reason
            num_whole += 1
    assert num_whole > NUM_REQUESTS // 2
