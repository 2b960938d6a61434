"""Streams one text to a terminal, from an engine in this process.

Accepted draft tokens are coloured, tokens of the verify stage are not. The text does not depend on
drafting.
"""

import time
from collections.abc import Callable

from eesd_dist.config import EngineConfig
from eesd_dist.engine.layout import layout_of
from eesd_dist.engine.local import Generation, LocalEngine, with_all_cores
from eesd_dist.errors import PromptTooLong
from eesd_dist.model.checkpoint_folder import require_checkpoint
from eesd_dist.text import StreamDecoder, Tokenizer
from eesd_dist.types import Emission, Request, RequestId, SamplingParams, SpeculationParams
from serve_app.cli.configuration import GenerateOptions

_ACCEPTED = "\033[32m"
_PLAIN = "\033[0m"


def stream_text(
    config: EngineConfig,
    options: GenerateOptions,
    *,
    prompt: str,
    seed: int,
    write: Callable[[str], None],
    note: Callable[[str], None],
    in_colour: bool,
) -> None:
    """Raises ConfigError and RequestError; `note` gets the summary line."""
    require_checkpoint(config.model.path)
    tokenizer = Tokenizer.load(config.model.path)
    tokens = (
        tokenizer.encode(prompt)
        if options.raw
        else tokenizer.encode_chat(
            [{"role": "user", "content": prompt}], add_generation_prompt=True
        )
    )
    max_model_len = layout_of(config).max_model_len
    room = max_model_len - len(tokens)
    if room < 1:
        raise PromptTooLong(num_tokens=len(tokens), limit=max_model_len - 1)
    request = Request(
        request_id=RequestId("generate"),
        prompt=tokens,
        sampling=SamplingParams(
            temperature=options.temperature,
            top_p=options.top_p,
            seed=seed,
            max_tokens=min(options.max_tokens, room),
            stop_token_ids=tokenizer.eos_token_ids,
        ),
        speculation=SpeculationParams(mode="off" if options.no_speculation else "auto"),
    )
    # Costs are measured at start, for batches of up to this size.
    single = config.scheduler.model_copy(update={"max_running": 1})
    llm = LocalEngine(with_all_cores(config.model_copy(update={"scheduler": single})))
    decoder = StreamDecoder(tokenizer)
    generation = Generation(request_id=request.request_id)
    began_s = time.perf_counter()
    try:
        for emission in llm.stream([request]):
            generation.take(emission)
            write(_shown(emission, decoder, in_colour=in_colour))
    finally:
        llm.close()
    write(f"{decoder.finish()}\n")
    note(_summary(generation, took_s=time.perf_counter() - began_s, seed=seed))


def _shown(emission: Emission, decoder: StreamDecoder, *, in_colour: bool) -> str:
    accepted = decoder.feed(emission.tokens[: emission.num_accepted])
    own = decoder.feed(emission.tokens[emission.num_accepted :])
    return f"{_ACCEPTED}{accepted}{_PLAIN}{own}" if in_colour and accepted else accepted + own


def _summary(generation: Generation, *, took_s: float, seed: int) -> str:
    num_tokens, num_drafted = len(generation.tokens), sum(generation.drafted)
    rate = num_tokens / took_s if took_s > 0 else 0.0
    per_round = num_tokens / max(len(generation.drafted), 1)
    drafts = "nothing drafted"
    if num_drafted:
        share = sum(generation.accepted) / num_drafted
        drafts = f"{share:.0%} of {num_drafted} drafted tokens accepted"
    return (
        f"{num_tokens} tokens in {took_s:.2f} s ({rate:.1f} tokens/s), "
        f"{per_round:.2f} tokens per round, {drafts}, seed {seed}"
    )
