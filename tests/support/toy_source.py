"""Sources of Ray Data's generating stage with a toy engine, which certain prompts kill."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from eesd_dist.errors import EngineError
from serve_app.batch.local_client import answered_by
from serve_app.batch.loop import AnswerBody
from serve_app.batch.usage import Usage
from serve_app.openai.text_service import TextService
from serve_app.openai.workloads import Kind
from tests.support.toy_api import toy_preparation
from tests.support.toy_engine import ToyEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class ToySource:
    """Describes a toy engine: its process dies under prompts with `kills`, and prompts with
    `breaks` break it."""

    starts: Path
    """File with a letter for every process that has started."""
    kills: str = "\0"
    breaks: str = "\0"
    delay_s: float = 0.0

    def build(self) -> "ToyAnswering":
        return ToyAnswering(self)


class ToyAnswering:
    max_attempts = 1
    max_rows = 1024
    patience_s = 60.0

    def __init__(self, source: ToySource) -> None:
        self._source = source
        self.is_broken = False
        with source.starts.open("a") as file:
            file.write("x")

    def waiting_for(self) -> str:
        return ""

    def close(self) -> Usage:
        return Usage()

    async def open(self) -> AnswerBody:
        engine = ToyEngine(vocab_size=128, delay_s=self._source.delay_s)
        answer = answered_by(TextService(engine, toy_preparation(model_name="toy")))

        async def answer_or_die(kind: Kind, body: Mapping[str, object]) -> bytes:
            prompt = str(body["prompt"])
            if self._source.kills in prompt:
                os._exit(1)
            self.is_broken |= self._source.breaks in prompt
            if self.is_broken:
                raise EngineError("CUDA out of memory (a toy's)")
            return await answer(kind, body)

        return answer_or_die
