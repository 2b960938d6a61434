"""`eesd bench host`: the host's time in a round, by batch, without a model.

Runs the real round loop of a 70B-shaped pipeline: scheduler, controller, drafting, headers, wire
format, the plan of a verify rank's rows, verdicts and commit. Layers, exit head and target are
replaced by tensors that exist already; vocabulary and hidden states are small, so that what is
counted does not grow with a model. Every part is one process's time: a deployment does `decode`,
`rows` and `rules` in each verify rank.
"""

# Shapes: T rows, D hidden size, V vocabulary, S sampled rows.

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from eesd_dist.bench.options import HostOptions
from eesd_dist.bench.output import print_report, say_unless
from eesd_dist.config import SchedulerConfig, SpeculationConfig
from eesd_dist.control.cost import CostModel
from eesd_dist.engine.core import EngineCore
from eesd_dist.engine.drafting.ranks import DraftCompute
from eesd_dist.engine.drafting.stage import DraftStage
from eesd_dist.model.attention.rows import RowPlan, RowSegment
from eesd_dist.provenance import collect_provenance
from eesd_dist.sampling.row_rules import rules_of
from eesd_dist.schedule.pages import PageAllocator
from eesd_dist.schedule.scheduler import Scheduler
from eesd_dist.transport import wire
from eesd_dist.transport.contracts import RoundHeader, VerifyReply
from eesd_dist.types import (
    Request,
    RequestId,
    RoundStats,
    SamplingParams,
    SpeculationParams,
    TokenId,
)

PAGE_SIZE = 32
_HIDDEN = 64
"""Narrow: copies of hidden states are a device's work."""
_VOCABULARY = 64
_DRAFT_LENGTH = 4
_ACCEPTED = 3
"""Of four drafted tokens, on average: lengths of answers differ as they do in service."""
_WARM_UP = 10
_CPU = torch.device("cpu")
_PARTS = ("plan", "draft", "header", "encode", "decode", "rows", "rules", "commit")


class Stopwatch:
    """Adds up seconds by the name of a part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        started = time.process_time()
        yield
        self.seconds[part] += time.process_time() - started

    def wrapped(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.timing(part):
                return function(*args, **kwargs)

        return timed


class NoModel:
    """Layers and exit head that compute nothing; `DraftCompute` in shape and order."""

    def __init__(self) -> None:
        spec = SimpleNamespace(vocab_size=_VOCABULARY, hidden_size=_HIDDEN, num_layers=80)
        self.span = SimpleNamespace(spec=spec, last=2, compute_dtype=torch.bfloat16)
        self.head = SimpleNamespace(vocab_ids=None)
        self.group = SimpleNamespace(rank=0, size=1)
        self._hidden_TD = torch.zeros(1 << 14, _HIDDEN, dtype=torch.bfloat16)
        self._logits_AV = torch.randn(1 << 10, _VOCABULARY)

    def run_layers(
        self, tokens: Sequence[int], segments: Sequence[RowSegment], *, kept: None = None
    ) -> tuple[Tensor, Tensor]:
        torch.tensor(tokens)
        _plan_of(segments)
        hidden_TD = self._hidden_TD[: len(tokens)]
        return hidden_TD, hidden_TD

    def run_head(self, input_TE: Tensor, segments: Sequence[RowSegment]) -> Tensor:
        return input_TE

    def logits(self, exit_AD: Tensor) -> Tensor:
        return self._logits_AV[: len(exit_AD)]

    def move(self, moves: Sequence[tuple[int, int]]) -> None: ...
    def begin(self) -> None: ...
    def check(self) -> None: ...
    def close(self) -> None: ...


class NoTarget:
    """The verify stage's host work; its verdict is made up."""

    peer = "none"

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self._reply: VerifyReply | None = None

    def send(
        self, header: RoundHeader, hidden_TD: Tensor, draft_probs_KV: Tensor | None = None
    ) -> int:
        with self._watch.timing("encode"):
            message = wire.encode_round(header, hidden_TD)
        with self._watch.timing("decode"):
            prefix = wire.decode_prefix(message.frame, epoch=header.epoch)
            header = wire.decode_round(prefix, message.frame, message.overflow)
        with self._watch.timing("rows"):
            RowPlan.build(
                [
                    RowSegment(start=s.start, num_rows=s.num_rows, pages=s.pages, parents=s.parents)
                    for s in header.segments
                ],
                page_size=PAGE_SIZE,
                device=_CPU,
                numerics="fast",
            )
        with self._watch.timing("rules"):
            for segment in header.segments:
                rules_of(segment)
        self._reply = _verdict(header)
        return sum(part.nbytes for part in message.parts)

    def receive(self) -> VerifyReply:
        assert self._reply is not None
        return self._reply

    def close(self) -> None: ...


def _plan_of(segments: Sequence[RowSegment]) -> RowPlan:
    return RowPlan.build(segments, page_size=PAGE_SIZE, device=_CPU, numerics="fast")


def _verdict(header: RoundHeader) -> VerifyReply:
    """Returns a verdict that accepts most of each draft."""
    tokens: list[int] = []
    for at, segment in enumerate(header.segments):
        if segment.num_sampled == 0:
            continue
        draft = segment.tokens[segment.num_rows - segment.num_sampled + 1 :]
        kept = min(len(draft), (at + header.round_id) % (2 * _ACCEPTED + 1))
        tokens += [*draft[:kept], *[_VOCABULARY - 1] * (len(draft) + 1 - kept)]
    none = np.zeros(0, np.int32)
    return VerifyReply(
        round_id=header.round_id,
        tokens=np.array(tokens, np.int32),
        accepted=none,
        logprobs=np.zeros(0, np.float32),
        top_ids=np.zeros((0, 0), np.int32),
        top_logprobs=np.zeros((0, 0), np.float32),
        verify_s=0.0,
        received_to_sent_s=0.0,
    )


def engine_of(batch: int, *, context: int, controller: str, watch: Stopwatch) -> EngineCore:
    """Returns an engine with `batch` requests that have computed `context` tokens each."""
    speculation = SpeculationConfig(controller=controller, fixed_length=_DRAFT_LENGTH)
    max_len = context + 4096
    draft = DraftStage(compute=cast("DraftCompute", NoModel()), page_size=PAGE_SIZE, device=_CPU)
    scheduler = Scheduler(
        config=SchedulerConfig(
            max_running=batch, token_budget=8192, prefill_chunk=4096, overlap=False
        ),
        pages=PageAllocator(
            num_pages=batch * (max_len // PAGE_SIZE + 2), page_size=PAGE_SIZE, prefix_caching=True
        ),
        max_model_len=max_len,
        max_draft_tokens=speculation.max_draft_tokens,
        vocab_size=_VOCABULARY,
        clock=time.monotonic,
    )
    cost = CostModel(
        draft_step_s=0.002,
        guess_s=0.0005,
        verify_s=tuple(0.012 + 0.0001 * rows for rows in range(1, 10)),
        verify_rows_s=((64, 0.02), (512, 0.05)),
        round_s=0.002,
    )
    core = EngineCore(
        draft=draft,
        channel=NoTarget(watch),
        scheduler=scheduler,
        speculation=speculation,
        cost=cost,
        clock=time.process_time,
    )
    for number in range(batch):
        prompt = tuple(TokenId((number + at) % _VOCABULARY) for at in range(context))
        core.add(
            Request(
                request_id=RequestId(f"request-{number}"),
                prompt=prompt,
                sampling=SamplingParams(max_tokens=4096, temperature=0.0, seed=number),
                speculation=SpeculationParams(),
            )
        )
    while scheduler.num_running < batch or any(
        not live.is_decoding for live in scheduler.running()
    ):
        core.step()
    return core


def measure(
    batch: int, *, context: int, controller: str, num_rounds: int
) -> dict[str, float | int]:
    """Returns milliseconds a round by part, and what the rounds were."""
    watch = Stopwatch()
    core = engine_of(batch, context=context, controller=controller, watch=watch)
    headers = core._headers
    headers.write = watch.wrapped("header", headers.write)  # type: ignore[method-assign]
    rounds: list[RoundStats] = []
    for _ in range(_WARM_UP):
        core.step()
    watch.seconds.clear()
    started = time.process_time()
    for _ in range(num_rounds):
        rounds += core.step().rounds
    total_s = time.process_time() - started
    watch.seconds["plan"] = sum(stats.plan_s for stats in rounds)
    watch.seconds["draft"] = sum(stats.draft_s for stats in rounds)
    watch.seconds["commit"] = sum(stats.commit_s for stats in rounds)
    found: dict[str, float | int] = {
        part: round(watch.seconds[part] / len(rounds) * 1e3, 4) for part in _PARTS
    }
    found["all"] = round(total_s / len(rounds) * 1e3, 4)
    found["num_rows"] = round(sum(stats.num_rows for stats in rounds) / len(rounds), 1)
    return found


def main(options: HostOptions) -> int:
    """Prints a table and the report."""
    say = say_unless(options.json)
    torch.set_num_threads(1)
    found: dict[str, dict[str, dict[str, float | int]]] = {}
    for controller in options.controllers:
        say(f"{controller}, contexts of {options.context} tokens, milliseconds a round")
        say(f"{'batch':>6} {'rows':>7} " + " ".join(f"{part:>8}" for part in (*_PARTS, "all")))
        found[controller] = {}
        for batch in options.batches:
            row = measure(
                batch, context=options.context, controller=controller, num_rounds=options.rounds
            )
            found[controller][str(batch)] = row
            times = " ".join(f"{row[part]:8.3f}" for part in (*_PARTS, "all"))
            say(f"{batch:>6} {row['num_rows']:>7} {times}")
    print_report(
        {"context": options.context, "ms": found, "provenance": collect_provenance().as_json()}
    )
    return 0
