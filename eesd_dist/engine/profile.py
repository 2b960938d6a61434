"""What a draft step and a verify pass cost on this machine, measured before the first request.

Runs real rows through the real stages on pages that hold nothing yet; the figures go to the
controllers. It decides nothing.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from eesd_dist.control.cost import CostModel
from eesd_dist.engine.draft import DraftStage
from eesd_dist.transport.contracts import RoundHeader, Segment, VerifyChannel

_REPEATS = 15
_WARM_UPS = 3


def measure_cost(
    draft: DraftStage,
    channel: VerifyChannel,
    *,
    page_size: int,
    num_pages: int,
    max_draft_tokens: int,
    generation: int,
) -> CostModel:
    """Seconds of one drafted token and of verifying 1..max_draft_tokens + 1 rows.

    Lower quartiles: on a shared machine whatever disturbs a run makes it longer.
    """
    longest = max_draft_tokens + 1
    pages = tuple(range(min(num_pages, -(-(longest + 2 * page_size) // page_size))))
    start = max(0, len(pages) * page_size - longest - page_size // 2)
    step_s = _usual(partial(draft.rehearse, position=start, pages=pages, drafts=True))
    known_s = _usual(partial(draft.rehearse, position=start, pages=pages, drafts=False))
    return CostModel(
        draft_step_s=step_s,
        round_s=known_s,
        # Every length on its own: kernels take rows in blocks, so the times rise in steps.
        verify_s=tuple(
            _usual(partial(_verify, draft, channel, rows, start, pages, generation))
            for rows in range(1, longest + 1)
        ),
    )


def _usual(run: Callable[[], None]) -> float:
    took: list[float] = []
    for _ in range(_WARM_UPS + _REPEATS):
        started = time.perf_counter()
        run()
        took.append(time.perf_counter() - started)
    return statistics.quantiles(took[_WARM_UPS:], n=4)[0]


def _verify(
    draft: DraftStage,
    channel: VerifyChannel,
    rows: int,
    start: int,
    pages: tuple[int, ...],
    generation: int,
) -> None:
    hidden_TD = torch.zeros(
        rows, draft.span.spec.hidden_size, dtype=draft.span.compute_dtype, device=draft.device
    )
    segment = Segment(
        start=start,
        num_rows=rows,
        num_sampled=rows,
        pages=pages,
        tokens=(0,) * rows,
        history=(),
        num_prompt=start,
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        seed=0,
        min_tokens=0,
        stop_token_ids=(),
        logit_bias=(),
        top_logprobs=None,
    )
    channel.send(RoundHeader(generation=generation, round_id=0, segments=(segment,)), hidden_TD)
    channel.receive()
