"""A verify pass of several ranks in one compiled call against the same pass layer by layer."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from eesd_dist.backends.lazy import LazyCompiled
from eesd_dist.config import EngineConfig
from eesd_dist.engine.build import load_verify_weights
from eesd_dist.engine.verify import VerifyStage
from eesd_dist.page_table import PageTable
from eesd_dist.transport.contracts import RoundHeader, Segment
from eesd_dist.transport.thread_group import ThreadGroup
from eesd_dist.types import ChoiceParams
from tests.support.thread_ranks import on_ranks
from tests.unit.engine.conftest import MakeConfig

VOCAB_SIZE = 96
ROW_RULES: Sequence[dict[str, Any]] = (
    {},
    {"top_p": 0.7},
    {"top_k": 9, "min_p": 0.02},
    {"repetition_penalty": 1.3, "logit_bias": ((7, 2.0),)},
    {"min_tokens": 30, "stop_token_ids": (3, 40)},
)


def a_header(rng: random.Random, *, start: int) -> RoundHeader:
    """Prompts, chains, and chains of which masks leave some tokens or one, with any rule."""
    segments = []
    for number in range(6):
        num_sampled = rng.choice([0, 1, 4])
        num_rows = num_sampled + rng.choice([0, 3]) or 2
        masks = b""
        if number % 2:
            allowed = [rng.sample(range(VOCAB_SIZE), rng.choice([1, 40])) for _ in range(5)]
            words = [sum(1 << token for token in some).to_bytes(12, "little") for some in allowed]
            masks = b"".join(words[:num_sampled])
        params = ChoiceParams(
            temperature=rng.choice([0.0, 0.9]), seed=number, **rng.choice(ROW_RULES)
        )
        segments.append(
            Segment(
                start=start,
                num_rows=num_rows,
                num_sampled=num_sampled,
                pages=PageTable((2 * number, 2 * number + 1)),
                tokens=tuple(rng.randrange(VOCAB_SIZE) for _ in range(num_rows)),
                history=(),
                num_prompt=2,
                params=params,
                masks=masks,
                top_logprobs=rng.choice([None, None, 2]),
            )
        )
    return RoundHeader(epoch=0, round_id=start, segments=tuple(segments))


def verify(config: EngineConfig, group: ThreadGroup, *, with_call: bool) -> list[list[object]]:
    """Returns the tokens of each round, those of some rows with their log-probabilities."""
    stage: VerifyStage = load_verify_weights(config, group).stage(num_pages=16)
    assert stage.verifier is not None
    if not with_call:
        stage._verifier = LazyCompiled.without()
    rng, generator = random.Random(5), torch.Generator().manual_seed(5)
    tokens: list[list[object]] = []
    for turn in range(3):
        header = a_header(rng, start=6 * turn)
        hidden_TD = torch.randn(header.num_rows, stage.span.spec.hidden_size, generator=generator)
        reply = stage.verify(header, hidden_TD, None)
        tokens.append(reply.tokens.tolist())
        end = 0
        for segment in header.segments:
            first, end = end, end + segment.num_sampled
            if segment.top_logprobs is not None:
                rows = slice(first, end)
                tokens[-1] += zip(
                    reply.logprobs[rows].tolist(), reply.top_ids[rows].tolist(), strict=True
                )
    return tokens


@pytest.mark.parametrize(("dtype", "num_ranks"), [("float32", 2), ("bfloat16", 2), ("float32", 4)])
def test_ranks_verify_in_one_call_what_they_verify_layer_by_layer(
    dtype: str, num_ranks: int, make_config: MakeConfig
) -> None:
    config = make_config(dtype=dtype)
    expected = on_ranks(num_ranks, lambda group: verify(config, group, with_call=False))
    actual = on_ranks(num_ranks, lambda group: verify(config, group, with_call=True))
    assert actual == expected
    assert all(tokens == actual[0] for tokens in actual)


def test_a_group_that_sums_by_messages_verifies_the_same_without_the_call(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()
    expected = on_ranks(2, lambda group: verify(config, group, with_call=True))
    monkeypatch.setattr(ThreadGroup, "sums_on_host", False)
    assert on_ranks(2, lambda group: verify(config, group, with_call=True)) == expected
