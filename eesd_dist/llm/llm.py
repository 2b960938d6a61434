"""`LLM`: both stages in the caller's process, without Ray and without a server.

Texts are those of the HTTP API: the same fields, checked by the same code. Used from one thread.
"""

import random
import secrets
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from msgspec import structs
from pydantic import TypeAdapter, ValidationError
from tqdm import tqdm

from eesd_dist.config import EngineConfig
from eesd_dist.engine.layout import layout_of
from eesd_dist.engine.local import LocalEngine, with_all_cores
from eesd_dist.errors import RequestError
from eesd_dist.llm.outputs import RequestOutput
from eesd_dist.llm.sampling_params import SamplingParams
from eesd_dist.llm.settings import engine_config
from eesd_dist.llm.texts import GrowingText, ParentRequest
from eesd_dist.model.checkpoint_folder import require_checkpoint, with_local_folder
from eesd_dist.parameters import (
    Message,
    Messages,
    asked_grammar,
    check_ids,
    choice_seed,
    conversation_of,
    sampling_params,
)
from eesd_dist.text import TextAssembler, TextDelta, Tokenizer
from eesd_dist.text.sampling_defaults import SamplingDefaults
from eesd_dist.types import Request, RequestId, SpeculationParams, TokenId

Prompt = str | Sequence[int] | Mapping[str, object]
"""Text, token ids, or a mapping with `prompt` or `prompt_token_ids`."""
Conversation = Sequence[Mapping[str, object]]
"""Messages with `role` and `content`, as the HTTP API takes them."""


@dataclass(frozen=True, slots=True)
class _Chat:
    """A prompt that the chat template makes."""

    messages: object
    options: Mapping[str, object]


_MESSAGES: TypeAdapter[list[Message]] = TypeAdapter(Messages)
_SEED_BITS = 48


class LLM:
    """Generates texts with early-exit speculation, the same as without."""

    def __init__(
        self,
        model: str | Path | EngineConfig,
        *,
        seed: int | None = None,
        **settings: object,
    ) -> None:
        """`model`: a checkpoint folder, a name of the Hugging Face hub, or a whole configuration.
        `seed`: of the seeds of texts that have none; None draws it. `settings`: keys of
        docs/configuration.md without their sections, such as `dtype`, `device`, `max_model_len`,
        `numerics`, `controller`.

        Raises ConfigError or CheckpointError if it cannot be loaded.
        """
        config = with_all_cores(with_local_folder(engine_config(model, settings)))
        require_checkpoint(config.model.path)
        self._tokenizer = Tokenizer.load(config.model.path)
        self._defaults = SamplingDefaults.of_folder(
            config.model.path, mode=config.model.generation_config
        )
        self._max_model_len = layout_of(config).max_model_len
        self._engine = LocalEngine(config)
        self._numbers = count()
        self._seeds = random.Random(secrets.randbits(_SEED_BITS) if seed is None else seed)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        speculation: SpeculationParams = SpeculationParams(),
    ) -> list[RequestOutput]:
        """Continues each prompt; returns the outputs in the order of the prompts.

        `sampling_params`: one for all prompts or one for each; None takes the checkpoint's. The
        output of a prompt of a list that cannot be continued has the error; a prompt by itself
        raises it, a RequestError.
        """
        is_single = _is_one_prompt(prompts)
        return self._outputs(
            [prompts] if is_single else prompts,
            sampling_params,
            use_tqdm,
            speculation,
            is_single=is_single,
        )

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, object] | None = None,
        speculation: SpeculationParams = SpeculationParams(),
    ) -> list[RequestOutput]:
        """Answers each conversation, as `generate` continues prompts. `tools` go to the chat
        template; the model's calls are in the text."""
        options: dict[str, object] = {
            **(chat_template_kwargs or {}),
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        if tools is not None:
            options["tools"] = list(tools)
        is_single = _is_conversation(messages)
        prompts = [
            _Chat(conversation, options) for conversation in ([messages] if is_single else messages)
        ]
        return self._outputs(prompts, sampling_params, use_tqdm, speculation, is_single=is_single)

    def stream(
        self,
        prompt: Prompt | Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        speculation: SpeculationParams = SpeculationParams(),
    ) -> Iterator[TextDelta]:
        """Yields one text round by round. Closing the iterator ends the request.

        Raises RequestError for a prompt or parameters that cannot be served."""
        content = (
            _Chat(prompt, {"add_generation_prompt": True}) if _is_conversation(prompt) else prompt
        )
        parent = self._parent(
            content, sampling_params or self.get_default_sampling_params(), speculation
        )
        if parent.error is not None:
            raise parent.error
        text = parent.texts[0]
        for emission in self._engine.stream([text.request]):
            delta = text.take(emission, at_s=0.0)
            if delta is None:
                assert text.error is not None
                raise text.error
            yield delta
            if text.is_over():
                return

    def get_tokenizer(self) -> Any:
        """Returns the tokenizer of transformers."""
        return self._tokenizer.backend

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the checkpoint's, by its `generation_config.json`."""
        return SamplingParams.of_defaults(self._defaults)

    def close(self) -> None:
        """Frees the model. Every later call raises EngineError."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _outputs(
        self,
        prompts: Iterable[object],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        speculation: SpeculationParams,
        *,
        is_single: bool,
    ) -> list[RequestOutput]:
        prompts = list(prompts)
        parents = [
            self._parent(prompt, params, speculation)
            for prompt, params in zip(prompts, self._one_for_each(sampling, prompts), strict=True)
        ]
        self._run([text for parent in parents for text in parent.texts], use_tqdm=use_tqdm)
        outputs = [parent.output(self._tokenizer) for parent in parents]
        if is_single and outputs[0].error is not None:
            raise outputs[0].error
        return outputs

    def _run(self, texts: Sequence[GrowingText], *, use_tqdm: bool) -> None:
        began_s = time.perf_counter()
        growing = {text.request.request_id: text for text in texts}

        def refused(request_id: RequestId, error: RequestError) -> None:
            growing[request_id].error = error
            bar.update()

        with tqdm(total=len(texts), unit="text", file=sys.stderr, disable=not use_tqdm) as bar:
            for emission in self._engine.stream([t.request for t in texts], on_refusal=refused):
                text = growing[emission.request_id]
                if text.is_over():
                    continue
                text.take(emission, at_s=time.perf_counter() - began_s)
                if text.is_over():
                    bar.update()
                    if emission.finish_reason is None:
                        self._engine.abort(emission.request_id)

    def _one_for_each(
        self, sampling: SamplingParams | Sequence[SamplingParams] | None, prompts: Sequence[object]
    ) -> Sequence[SamplingParams]:
        params: Sequence[object] = (
            sampling
            if isinstance(sampling, Sequence)
            else [sampling or self.get_default_sampling_params()] * len(prompts)
        )
        for entry in params:
            if not isinstance(entry, SamplingParams):
                raise RequestError(
                    f"sampling_params: found {type(entry).__name__}, expected SamplingParams",
                    param="sampling_params",
                )
        if len(params) != len(prompts):
            raise RequestError(
                f"sampling_params: found {len(params)} for {len(prompts)} prompts, expected one, "
                "or one for each prompt",
                param="sampling_params",
            )
        return cast("Sequence[SamplingParams]", params)

    def _parent(
        self, prompt: object, params: SamplingParams, speculation: SpeculationParams
    ) -> ParentRequest:
        parent = ParentRequest(
            request_id=f"llm-{next(self._numbers)}",
            params=params,
            seed=self._seeds.getrandbits(_SEED_BITS) if params.seed is None else params.seed,
        )
        try:
            parent.prompt, parent.tokens = self._encoded(prompt)
            parent.texts = [
                GrowingText(request, self._assembler(request, params))
                for request in self._requests(parent, speculation)
            ]
        except RequestError as error:
            parent.error = error
        return parent

    def _encoded(self, prompt: object) -> tuple[str | None, tuple[TokenId, ...]]:
        """Returns the text of a prompt and its tokens. Raises RequestError."""
        text: str | None = None
        if isinstance(prompt, _Chat):
            messages = conversation_of(_messages_of(prompt.messages))
            text = self._tokenizer.render_chat(messages, **prompt.options)
            tokens = self._tokenizer.encode(text, add_special_tokens=False)
        else:
            content = _text_or_ids(prompt)
            if isinstance(content, str):
                text, tokens = content, self._tokenizer.encode(content)
            else:
                check_ids(content, self._tokenizer, param="prompt_token_ids")
                tokens = tuple(TokenId(token) for token in content)
        if not tokens:
            raise RequestError("the prompt is empty: give at least one token", param="prompt")
        return text, tokens

    def _requests(self, parent: ParentRequest, speculation: SpeculationParams) -> list[Request]:
        params = parent.params
        grammar = asked_grammar(params)
        sampling = sampling_params(
            params,
            self._tokenizer,
            max_tokens=params.max_tokens or self._max_model_len,
            top_logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            grammar=None if grammar is None else grammar.grammar,
        )
        return [
            Request(
                request_id=RequestId(f"{parent.request_id}-{i}"),
                prompt=parent.tokens,
                sampling=structs.replace(
                    sampling,
                    seed=choice_seed(parent.seed, i),
                    max_tokens=params.max_tokens or self._max_model_len,
                ),
                speculation=speculation,
            )
            for i in range(params.n)
        ]

    def _assembler(self, request: Request, params: SamplingParams) -> TextAssembler:
        return TextAssembler(
            self._tokenizer,
            request.sampling,
            stops=params.stops,
            include_stop_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
        )


def _is_one_prompt(prompts: object) -> bool:
    """Returns True if these are not several prompts in a list."""
    return (
        isinstance(prompts, str | Mapping)
        or not isinstance(prompts, Sequence)
        or bool(prompts and isinstance(prompts[0], int))
    )


def _is_conversation(prompt: object) -> bool:
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping)


def _messages_of(messages: object) -> list[Message]:
    try:
        return _MESSAGES.validate_python(messages)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in first["loc"])
        raise RequestError(
            f"messages{path}: found {first['input']!r:.80}: {first['msg']}", param="messages"
        ) from error


def _text_or_ids(prompt: object) -> str | Sequence[int]:
    if isinstance(prompt, Mapping):
        contents = [prompt[name] for name in ("prompt_token_ids", "prompt") if name in prompt]
        prompt = contents[0] if contents else prompt
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Sequence) and all(
        isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in prompt
    ):
        return prompt
    raise RequestError(
        f"found the prompt {prompt!r:.80}, expected a text, token ids, or a mapping with `prompt` "
        "or `prompt_token_ids`",
        param="prompt",
    )
