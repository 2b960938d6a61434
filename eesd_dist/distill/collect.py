"""Text for self-distillation: what the target itself writes after the given prompts.

Generated in batches without speculation; every second one greedy, the others sampled. Sequences
(prompt and answer, token ids) go to a JSON-lines file, a whole line at a time, so that a run that
was stopped goes on where it ended. It knows nothing of engines, text or training.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from eesd_dist.types import Request, RequestId, SamplingParams, SpeculationParams, TokenId

_BATCH = 16


class Written(Protocol):
    """What the target wrote for one request."""

    @property
    def tokens(self) -> Sequence[TokenId]: ...


class Writer(Protocol):
    """The target, taking requests to their ends."""

    def generate(self, requests: Sequence[Request]) -> Sequence[Written]: ...


def collect(
    target: Writer,
    prompts: Sequence[Sequence[TokenId]],
    file: Path,
    *,
    max_tokens: int,
    stop_token_ids: tuple[int, ...],
) -> Iterator[int]:
    """Continues `file` to one line per prompt; yields the number of lines after each batch."""
    done = _whole_lines(file)
    with file.open("a", encoding="utf-8") as out:
        for first in range(done, len(prompts), _BATCH):
            batch = range(first, min(first + _BATCH, len(prompts)))
            requests = [
                Request(
                    request_id=RequestId(f"collect-{i}"),
                    prompt=tuple(prompts[i]),
                    sampling=SamplingParams(
                        temperature=0.0 if i % 2 else 0.8,
                        seed=i,
                        max_tokens=max_tokens,
                        stop_token_ids=stop_token_ids,
                    ),
                    speculation=SpeculationParams(mode="off"),
                )
                for i in batch
            ]
            for request, generation in zip(requests, target.generate(requests), strict=True):
                out.write(json.dumps([*request.prompt, *generation.tokens]) + "\n")
            out.flush()
            yield batch.stop


def read_sequences(file: Path) -> list[list[int]]:
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _whole_lines(file: Path) -> int:
    """Number of complete lines; a torn last one is cut off."""
    if not file.exists():
        return 0
    content = file.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        with file.open("r+b") as handle:
            handle.truncate(end)
    return content[:end].count(b"\n")
