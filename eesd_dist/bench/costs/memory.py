"""`eesd bench memory`: a target's speed on a CPU against that of reading its weights.

For every token a model reads all of its weights, so that no decoder of one request is faster than
the memory. Measures how fast this machine reads, plain decoding, a verify pass of eight rows
against one of one row, and transformers on the same weights and threads.
"""

# Shapes: T rows, D hidden size, N numbers.

import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from eesd_dist.bench.costs.options import MemoryOptions
from eesd_dist.bench.output import print_report, say_unless
from eesd_dist.compiled import can_compile, inner
from eesd_dist.config import (
    CacheConfig,
    DType,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SpeculationConfig,
)
from eesd_dist.engine.build import (
    build_draft_engine,
    layout_of,
    load_draft_weights,
    load_verify_weights,
)
from eesd_dist.engine.core import EngineCore
from eesd_dist.engine.profile import greedy_segment
from eesd_dist.engine.verify import VerifyStage
from eesd_dist.errors import ConfigError
from eesd_dist.model.cpu.calls import call_in_threads
from eesd_dist.provenance import collect_provenance
from eesd_dist.transport.contracts import RoundHeader
from eesd_dist.transport.group_handles import SingleGroup
from eesd_dist.transport.memory import MemoryChannel
from eesd_dist.types import Request, RequestId, SamplingParams, SpeculationParams, TokenId

_BUFFER_BYTES = 1 << 30
"""Larger than any cache."""
_NUM_PAGES, _PAGE_SIZE = 16, 32
_PROMPT = tuple(TokenId(3 + number) for number in range(8))
_ROWS = 8
_REPEATS = 5


def _sum_part(
    numbers_N: npt.NDArray[np.int64],
    sums_P: npt.NDArray[np.int64],
    counters: npt.NDArray[np.int64],
    part: int,
    num_parts: int,
) -> None:
    share = len(numbers_N) // num_parts
    total = 0
    for number in numbers_N[part * share : (part + 1) * share]:
        total += number
    sums_P[part] = total


def read_bandwidth(*, num_threads: int) -> float:
    """Returns the bytes per second at which memory is read: the fastest of some passes over a large
    buffer."""
    numbers_N = np.ones(_BUFFER_BYTES // 8, np.int64)
    sums_P = np.zeros(num_threads, np.int64)
    run = partial(call_in_threads, inner(_sum_part), num_threads, numbers_N, sums_P)
    run()  # compiles
    return _BUFFER_BYTES / min(_seconds(run) for _ in range(_REPEATS))


def weights_per_token(path: Path, *, tied: bool) -> int:
    """Returns how many weights a token multiplies: all but an embedding of its own, of which it
    reads one row."""
    count = 0
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                if tied or not name.endswith("embed_tokens.weight"):
                    count += math.prod(tensors.get_slice(name).get_shape())
    return count


def main(options: MemoryOptions) -> None:
    """Prints a table and the report. Raises ConfigError without a compiler of kernels."""
    if not can_compile():
        raise ConfigError("bench memory measures compiled layers: install numba")
    say = say_unless(options.json)
    dtype = layout_of(_config(options, 1)).dtype
    rows = [_measured(options, dtype, num_threads) for num_threads in options.threads]
    say("threads  loaded s  read GB/s  plain ms  of bound  verify 8/1  transformers ms  plain over")
    for row in rows:
        say(
            f"{row['threads']:7d}{row['loaded_s']:10.1f}{row['read_gb_per_s']:11.1f}"
            f"{row['plain_ms']:10.1f}{row['plain_of_bound']:10.2f}{row['verify_8_over_1']:12.2f}"
            f"{row['transformers_ms']:17.1f}{row['plain_over_transformers']:12.2f}"
        )
    print_report({"rows": rows, "dtype": dtype, "provenance": collect_provenance().as_json()})


def _config(options: MemoryOptions, num_threads: int) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(path=options.model, dtype=options.dtype, device="cpu"),
        cache=CacheConfig(num_pages=_NUM_PAGES, page_size=_PAGE_SIZE, prefix_caching=False),
        speculation=SpeculationConfig(max_draft_tokens=0),
        parallel=ParallelConfig(num_threads=num_threads),
    )


def _measured(options: MemoryOptions, dtype: DType, num_threads: int) -> dict[str, Any]:
    torch.set_num_threads(num_threads)
    config, group = _config(options, num_threads), SingleGroup()
    layout = layout_of(config)
    began = time.perf_counter()
    draft = load_draft_weights(config, layout, group)
    remaining = load_verify_weights(config, group)
    stage = remaining.stage(num_pages=_NUM_PAGES)
    shard = draft.shard(num_pages=_NUM_PAGES)
    loaded_s = time.perf_counter() - began
    engine = build_draft_engine(config, MemoryChannel(stage.verify), shard=shard)
    plain_s = _plain_s(engine, options.tokens)
    one_s, eight_s = (_verify_s(stage, num_rows) for num_rows in (1, _ROWS))
    count = weights_per_token(options.model, tied=layout.spec.tie_word_embeddings)
    num_bytes = count * (4 if dtype == "float32" else 2)
    bandwidth = read_bandwidth(num_threads=num_threads)
    other_s = _transformers_s(options, dtype)
    return {
        "threads": num_threads,
        "loaded_s": round(loaded_s, 2),
        "read_gb_per_s": round(bandwidth / 1e9, 2),
        "gb_per_token": round(num_bytes / 1e9, 3),
        "plain_ms": round(1e3 * plain_s, 2),
        "plain_of_bound": round(num_bytes / bandwidth / plain_s, 3),
        "verify_8_over_1": round(eight_s / one_s, 3),
        "transformers_ms": round(1e3 * other_s, 2),
        "plain_over_transformers": round(other_s / plain_s, 3),
    }


def _plain_s(engine: EngineCore, num_tokens: int) -> float:
    """Returns the seconds of a round of plain decoding, the median."""
    engine.add(
        Request(
            request_id=RequestId("plain"),
            prompt=_PROMPT,
            sampling=SamplingParams(temperature=0.0, max_tokens=num_tokens),
            speculation=SpeculationParams(mode="off"),
        )
    )
    rounds_s: list[float] = []
    while engine.has_work:
        rounds_s.append(_seconds(partial(engine.step, wait_s=0.0)))
    return statistics.median(rounds_s[2:])


def _verify_s(stage: VerifyStage, num_rows: int) -> float:
    spec = stage.span.spec
    hidden_TD = torch.zeros(num_rows, spec.hidden_size, dtype=stage.span.compute_dtype)
    segment = greedy_segment(start=64, num_rows=num_rows, pages=range(_NUM_PAGES))
    header = RoundHeader(epoch=0, round_id=0, segments=(segment,))
    run = partial(stage.verify, header, hidden_TD, None)
    run()
    return statistics.median(_seconds(run) for _ in range(_REPEATS))


def _transformers_s(options: MemoryOptions, dtype: DType) -> float:
    """Returns the seconds per token of greedy generation after the prompt."""
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=getattr(torch, dtype), local_files_only=True
    )
    model.eval()
    ids = torch.tensor([_PROMPT])

    def generate(num_tokens: int) -> None:
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
            )

    generate(2)
    taken_s = [_seconds(partial(generate, count)) for count in (1, 1 + options.tokens)]
    return (taken_s[1] - taken_s[0]) / options.tokens


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
