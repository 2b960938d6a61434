"""Rounds and replies of all forms, for the tests of the transports."""

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from eesd_dist.page_table import PageTable
from eesd_dist.transport.contracts import RoundHeader, Segment, VerifyReply
from eesd_dist.types import ChoiceParams

_i32 = st.integers(0, 2**31 - 1)
_ids = st.lists(_i32, max_size=12).map(tuple)
_reals = st.floats(allow_nan=False)
_params = st.builds(
    ChoiceParams,
    temperature=_reals,
    top_p=_reals,
    top_k=st.integers(-1, 2**31 - 1),
    min_p=_reals,
    repetition_penalty=_reals,
    presence_penalty=_reals,
    frequency_penalty=_reals,
    logit_bias=st.lists(st.tuples(_i32, _reals), max_size=4).map(tuple),
    seed=st.integers(-(2**63), 2**64 - 1),
    min_tokens=_i32,
    stop_token_ids=_ids,
)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    num_rows = draw(st.integers(0, 9))
    num_sampled = draw(st.integers(0, num_rows))
    parents: list[int] = []
    if num_sampled > 1 and draw(st.booleans()):
        parents = [draw(st.integers(-1, node - 1)) for node in range(num_sampled - 1)]
    return Segment(
        start=draw(_i32),
        num_rows=num_rows,
        num_sampled=num_sampled,
        pages=PageTable(draw(_ids)),
        tokens=draw(_ids),
        history=draw(_ids),
        num_prompt=draw(_i32),
        params=draw(_params),
        top_logprobs=draw(st.none() | st.integers(0, 20)),
        parents=tuple(parents),
        masks=draw(st.binary(max_size=6)) * num_sampled,
        forced=draw(st.lists(_i32, max_size=num_rows - num_sampled).map(tuple)),
        forced_top_logprobs=draw(st.integers(0, 20)),
    )


@st.composite
def headers(draw: st.DrawFn) -> RoundHeader:
    return RoundHeader(
        epoch=draw(st.integers(0, 2**62)),
        round_id=draw(st.integers(0, 2**62)),
        segments=draw(st.lists(segments(), max_size=6).map(tuple)),
        trace_id=draw(st.binary(min_size=16, max_size=16)),
        span_id=draw(st.integers(0, 2**64 - 1)),
        wants_rejection=draw(st.booleans()),
        kv_moves=draw(st.lists(st.tuples(_i32, _i32), max_size=5).map(tuple)),
    )


def segment(*, num_rows: int = 4, start: int = 100, history: tuple[int, ...] = ()) -> Segment:
    return Segment(
        start=start,
        num_rows=num_rows,
        num_sampled=num_rows,
        pages=PageTable(range(8)),
        tokens=tuple(range(num_rows)),
        history=history,
        num_prompt=50,
        params=ChoiceParams(
            temperature=0.7,
            top_p=0.9,
            repetition_penalty=1.1,
            seed=2**64 - 7,
            stop_token_ids=(1, 2),
            logit_bias=((5, -0.1),),
        ),
    )


def header(round_id: int = 17, *, epoch: int = 3, num_rows: int = 4) -> RoundHeader:
    return RoundHeader(epoch=epoch, round_id=round_id, segments=(segment(num_rows=num_rows),))


def hidden(num_rows: int = 4, dim: int = 16, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(num_rows, dim, generator=torch.Generator().manual_seed(5)).to(dtype)


def reply_with(tokens: list[int], *, round_id: int = 17) -> VerifyReply:
    return VerifyReply(
        round_id=round_id,
        tokens=np.array(tokens, np.int32),
        accepted=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        top_ids=np.zeros((len(tokens), 0), np.int32),
        top_logprobs=np.zeros((len(tokens), 0), np.float32),
        verify_s=0.25,
        received_to_sent_s=0.5,
    )
