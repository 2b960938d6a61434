"""With `numerics: invariant` a row has the same bits in every batch.

The oracle is plain decoding: one row at a time, on consecutive pages.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from eesd_dist.config import DType
from eesd_dist.model.attention.rows import RowSegment
from eesd_dist.transport.thread_group import ThreadGroup
from tests.support.thread_ranks import on_ranks
from tests.support.tiny_checkpoints import save_tiny_model
from tests.unit.model.paged_stages import Stages


@dataclass(frozen=True, kw_only=True)
class Shape:
    page_size: int
    sizes: Mapping[str, object]
    family: str = "llama"


SHAPES = {
    "bundled": Shape(
        page_size=32,
        sizes={
            "hidden_size": 192,
            "intermediate_size": 448,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 24,
        },
    ),
    "wide groups": Shape(
        page_size=64,
        sizes={
            "hidden_size": 128,
            "intermediate_size": 336,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 64,
        },
    ),
    "one query a head": Shape(page_size=32, sizes={"num_key_value_heads": 4}),
    "small pages": Shape(page_size=16, sizes={"head_dim": 40, "intermediate_size": 100}),
    # Heads so narrow that the grouped call fails its self-check on many machines: row by row.
    "narrow heads": Shape(page_size=16, sizes={"num_key_value_heads": 4, "head_dim": 6}),
    "narrow heads, three queries": Shape(
        page_size=32,
        sizes={
            "hidden_size": 60,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "head_dim": 10,
        },
    ),
    # With 14 channels, only rows of fewer than ten keys depend on their position in a call.
    "one narrow head, tiny pages": Shape(
        page_size=4,
        sizes={
            "hidden_size": 72,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 14,
        },
    ),
    "narrow heads, window": Shape(
        page_size=16, sizes={"head_dim": 8}, family="mistral, sliding window"
    ),
    "window and scattered": Shape(
        page_size=32, sizes={"head_dim": 128}, family="mistral, sliding window"
    ),
    "head norms and biases": Shape(page_size=32, sizes={}, family="qwen3, biases"),
}
NUM_TOKENS = 100


def tokens_of(request: int) -> Tensor:
    generator = torch.Generator().manual_seed(request)
    return torch.randint(0, 96, (NUM_TOKENS,), generator=generator)


def load(folder: Path, shape: Shape, dtype: DType, group: ThreadGroup | None = None) -> Stages:
    return Stages.load(folder, dtype=dtype, page_size=shape.page_size, num_pages=64, group=group)


def random_chunks(rng: Random, longest: int) -> list[int]:
    chunks = []
    while sum(chunks) < NUM_TOKENS:
        chunks.append(min(rng.randint(1, longest), NUM_TOKENS - sum(chunks)))
    return chunks


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_row_has_the_same_bits_alone_in_a_verify_pass_and_in_a_chunk(
    tmp_path: Path, name: str, dtype: DType
) -> None:
    shape = SHAPES[name]
    save_tiny_model(tmp_path, shape.family, **shape.sizes)
    stages = load(tmp_path, shape, dtype)
    num_pages = max(10, NUM_TOKENS // shape.page_size)
    single_TV = stages.run_in_chunks(tokens_of(0), pages=range(num_pages), chunks=[1] * NUM_TOKENS)
    rng = Random(name)
    for chunks in (random_chunks(rng, 9), random_chunks(rng, 60), [17, 33, 34, 16]):
        pages = rng.sample(range(num_pages, 64), num_pages)
        logits_TV = stages.run_in_chunks(tokens_of(0), pages=pages, chunks=chunks)
        assert torch.equal(logits_TV, single_TV), f"chunks {chunks} on pages {pages}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["bundled", "one query a head", "narrow heads, three queries"])
def test_a_row_has_the_same_bits_in_any_company(tmp_path: Path, name: str, dtype: DType) -> None:
    shape = SHAPES[name]
    save_tiny_model(tmp_path, shape.family, **shape.sizes)
    stages = load(tmp_path, shape, dtype)
    pages = {request: range(12 * request, 12 * request + 12) for request in range(4)}
    single = {
        request: stages.run_in_chunks(
            tokens_of(request), pages=pages[request], chunks=[1] * NUM_TOKENS
        )
        for request in pages
    }
    rng = Random(name)
    done = dict.fromkeys(pages, 0)
    while min(done.values()) < NUM_TOKENS:
        running = [request for request in pages if done[request] < NUM_TOKENS]
        company = rng.sample(running, rng.randint(1, len(running)))
        counts = {
            request: min(rng.choice([1, 3, 8, 40]), NUM_TOKENS - done[request])
            for request in company
        }
        segments = [RowSegment(done[r], counts[r], pages[r]) for r in company]
        tokens_T = torch.cat([tokens_of(r)[done[r] : done[r] + counts[r]] for r in company])
        logits = stages.run(tokens_T, segments).split(list(counts.values()))
        for request, rows_TV in zip(company, logits, strict=True):
            expected_TV = single[request][done[request] : done[request] + counts[request]]
            assert torch.equal(rows_TV, expected_TV), f"{request} among {segments}"
            done[request] += counts[request]


def test_two_ranks_keep_the_promise_too(tmp_path: Path) -> None:
    shape = SHAPES["bundled"]
    save_tiny_model(tmp_path, shape.family, **shape.sizes)

    def rank(group: ThreadGroup) -> bool:
        stages = load(tmp_path, shape, "bfloat16", group)
        single_TV = stages.run_in_chunks(tokens_of(0), pages=range(12), chunks=[1] * NUM_TOKENS)
        chunks = random_chunks(Random(3), 12)
        logits_TV = stages.run_in_chunks(tokens_of(0), pages=range(20, 32), chunks=chunks)
        return torch.equal(logits_TV, single_TV)

    assert on_ranks(2, rank) == [True, True]


def test_what_earlier_requests_left_in_a_page_changes_nothing(tmp_path: Path) -> None:
    shape = SHAPES["bundled"]
    save_tiny_model(tmp_path, shape.family, **shape.sizes)
    stages = load(tmp_path, shape, "bfloat16")
    fresh_TV = stages.run_in_chunks(tokens_of(1)[:50], pages=range(12), chunks=[50])
    stages.run_in_chunks(tokens_of(2), pages=range(12), chunks=[NUM_TOKENS])
    reused_TV = stages.run_in_chunks(tokens_of(1)[:50], pages=range(12), chunks=[1] * 50)
    assert torch.equal(reused_TV, fresh_TV)
