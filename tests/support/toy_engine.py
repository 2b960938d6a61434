"""A toy behind `EngineClient`: tokens from a script or a hash, no model.

Deterministic in (prompt, seed, position) and asynchronous, like the real engine. Records which
requests ran, which were aborted and how many are live. Only a script ends a text early: a hash of a
drawn seed would hit an end token in one run of fifty.
"""

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from eesd_dist.types import Emission, FinishReason, Request, RequestId, TokenId, TokenLogprobs

Script = Callable[[Request], Sequence[int]]


class ToyEngine:
    """Emits `group` tokens at a time, all but the last of them "drafted and accepted"."""

    def __init__(
        self,
        *,
        script: Script | None = None,
        vocab_size: int = 256,
        group: int = 3,
        delay_s: float = 0.0,
    ) -> None:
        self.script = script
        self._vocab_size = vocab_size
        self.group = group
        self.rounds_per_batch = 1
        """Number of emissions that arrive together."""
        self.delay_s = delay_s
        self.refusal: Exception | None = None
        """Raised before the first token."""
        self.breaks_after: int | None = None
        """After this many tokens, `breakage` is raised."""
        self.breakage: Exception = RuntimeError("toy broke")
        self.stalls_after: int | None = None
        """After this many tokens nothing comes any more."""
        self.requests: list[Request] = []
        self.aborted: list[RequestId] = []
        self.num_live = 0
        self.max_live = 0

    async def abort(self, request_id: RequestId) -> None:
        self.aborted.append(request_id)

    async def stream(self, request: Request) -> AsyncGenerator[tuple[Emission, ...], None]:
        self.requests.append(request)
        if self.refusal is not None:
            raise self.refusal
        self.num_live += 1
        self.max_live = max(self.max_live, self.num_live)
        try:
            batch: list[Emission] = []
            breakage: Exception | None = None
            try:
                async for emission in self._emissions(request):
                    batch.append(emission)
                    if len(batch) == self.rounds_per_batch:
                        yield tuple(batch)
                        batch.clear()
            except Exception as error:
                breakage = error
            if batch:
                yield tuple(batch)
            if breakage is not None:
                raise breakage
        finally:
            self.num_live -= 1

    async def _emissions(self, request: Request) -> AsyncGenerator[Emission, None]:
        started_s = time.monotonic()
        tokens, reason = self._tokens(request)
        num_left = 0
        for start in range(0, len(tokens), self.group):
            await asyncio.sleep(self.delay_s)
            if self.breaks_after is not None and num_left >= self.breaks_after:
                raise self.breakage
            if self.stalls_after is not None and num_left >= self.stalls_after:
                await asyncio.Event().wait()
            group = tokens[start : start + self.group]
            num_left += len(group)
            off = request.speculation.mode == "off"
            yield Emission(
                request_id=request.request_id,
                tokens=tuple(group),
                num_accepted=0 if off else len(group) - 1,
                num_drafted=0 if off else self.group - 1,
                logprobs=self._logprobs(request, group),
                prompt_logprobs=self._prompt_logprobs(request) if start == 0 else (),
                finish_reason=reason if num_left == len(tokens) else None,
                num_cached_prompt_tokens=1,
                queue_s=time.monotonic() - started_s if start == 0 else None,
            )

    def _tokens(self, request: Request) -> tuple[list[TokenId], FinishReason]:
        sampling = request.sampling
        tokens: list[TokenId] = []
        scripted = None if self.script is None else self.script(request)
        for i in range(sampling.max_tokens):
            if scripted is not None and i >= len(scripted):
                return tokens, FinishReason.STOP
            token = self._drawn(request, i) if scripted is None else scripted[i]
            tokens.append(TokenId(token))
            if token in sampling.stop_token_ids and i >= sampling.min_tokens:
                return tokens, FinishReason.STOP
        return tokens, FinishReason.LENGTH

    def _drawn(self, request: Request, position: int) -> int:
        seed = 0 if request.sampling.is_greedy else request.sampling.seed
        key = f"{request.prompt} {seed} {position}".encode()
        token = int.from_bytes(hashlib.sha256(key).digest()[:4], "big") % self._vocab_size
        while token in request.sampling.stop_token_ids:
            token = (token + 1) % self._vocab_size
        return token

    def _prompt_logprobs(self, request: Request) -> tuple[TokenLogprobs, ...]:
        num_top = request.sampling.prompt_logprobs
        if num_top is None:
            return ()
        return tuple(
            TokenLogprobs(
                logprob=-float(token),
                top=tuple((TokenId(i), -0.25 - i) for i in range(num_top)),
            )
            for token in request.prompt[1:]
        )

    def _logprobs(self, request: Request, group: Sequence[TokenId]) -> tuple[TokenLogprobs, ...]:
        num_top = request.sampling.top_logprobs
        if num_top is None:
            return ()
        return tuple(
            TokenLogprobs(
                logprob=-0.5,
                top=tuple(
                    (TokenId((token + i) % self._vocab_size), -0.5 - i) for i in range(num_top)
                ),
            )
            for token in group
        )
