"""Turns the bodies of requests into requests for an engine.

Decides everything about a request before any work starts: token ids, limits, seeds, ids. Refuses
what cannot be served, naming the field. Knows neither HTTP nor engines.
"""

import logging
import time
from collections.abc import Callable, Sequence

from msgspec import structs

from eesd_dist.errors import PromptTooLong, RequestError
from eesd_dist.parameters import (
    AskedGrammar,
    asked_grammar,
    check_ids,
    choice_seed,
    conversation_of,
    naming,
    sampling_params,
    with_defaults,
)
from eesd_dist.text import TextCodec
from eesd_dist.text.grammars import GrammarCompiler, GrammarProbe
from eesd_dist.types import Request, RequestId, TokenId
from serve_app.openai.api_settings import ApiSettings, Limits
from serve_app.openai.context import RequestContext
from serve_app.openai.errors import UnknownModel
from serve_app.openai.event_ids import StreamStart, StreamStarts
from serve_app.openai.keys import ANYONE, Permit
from serve_app.openai.prepared import (
    AnswerOptions,
    Choice,
    Prepared,
    Prompt,
    TextOptions,
    response_id_of,
)
from serve_app.openai.schema import (
    ChatFields,
    CompletionFields,
    GenerationFields,
    ignored,
    unsupported,
)
from serve_app.openai.tools import ToolUse, format_of, tool_use_of
from serve_app.openai.workloads import workload_of

logger = logging.getLogger(__name__)

_DEFAULT_COMPLETION_TOKENS = 16
_MAX_LISTED_TOKENS = 32_768
"""Most tokens of `/tokenize` and `/detokenize`, unless the model takes more."""
_MAX_WARNINGS = 16
_LISTED_CHARS = 64


class Preparation:
    """Prepares requests, and checks them against the served model."""

    def __init__(
        self,
        codec: TextCodec,
        settings: ApiSettings,
        *,
        limits: Limits | None = None,
        kv_tokens: Callable[[], int | None] = lambda: None,
    ) -> None:
        """`kv_tokens` returns what the KV pages hold, None while it is not known. `limits` None: a
        request may ask for as much as it likes, and take as long as it takes."""
        self.codec = codec
        self.settings = settings
        self.limits = limits
        self._grammars = GrammarCompiler(lambda: codec, probe=GrammarProbe().check)
        self._tool_format = format_of(codec.tool_template)
        marker_id = (
            None if self._tool_format is None else self._special_id(self._tool_format.marker)
        )
        self._marks = frozenset[TokenId]() if marker_id is None else frozenset({marker_id})
        self._kv_tokens = kv_tokens
        self._streams = StreamStarts(model=settings.model_name, key=settings.event_key)

    @property
    def max_model_len(self) -> int:
        """The longest text, prompt and answer together: of the model, and of the KV pages."""
        longest, kv_tokens = self.settings.max_model_len, self._kv_tokens()
        return longest if kv_tokens is None else min(longest, kv_tokens)

    def completion(self, fields: CompletionFields, context: RequestContext) -> Prepared:
        fields = with_defaults(fields, self.settings.sampling_defaults)
        self._check(fields)
        self._check_choices(len(fields.prompts), n=fields.n)
        start = self._streams.start(fields, context, num_choices=len(fields.prompts) * fields.n)
        prompts = tuple(self._tokens_of(fields, prompt) for prompt in fields.prompts)
        limit = _DEFAULT_COMPLETION_TOKENS if fields.max_tokens is None else fields.max_tokens
        return self._prepared(
            fields,
            context=context,
            start=start,
            prompts=prompts,
            max_tokens=[
                self._checked_limit(fields.max_tokens, prompt, default=limit) for prompt in prompts
            ],
            echoed=[self._echoed(fields, prompt) for prompt in fields.prompts],
            top_logprobs=fields.logprobs,
            prompt_logprobs=_more(fields.prompt_logprobs, fields.logprobs if fields.echo else None),
        )

    def chat(self, fields: ChatFields, context: RequestContext) -> Prepared:
        fields = with_defaults(fields, self.settings.sampling_defaults)
        self._check(fields)
        self._check_choices(1, n=fields.n)
        start = self._streams.start(fields, context, num_choices=fields.n)
        if fields.top_logprobs is not None and not fields.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        tool_use = self._tool_use(fields)
        tool_options = {} if tool_use is None else {"tools": list(tool_use.tools)}
        prompt = self.codec.encode_chat(
            conversation_of(fields.messages), **_chat_options(fields), **tool_options
        )
        self._check_length(prompt, param="messages")
        max_tokens = fields.max_completion_tokens or fields.max_tokens
        room = self.max_model_len - len(prompt)
        return self._prepared(
            fields,
            context=context,
            start=start,
            prompts=(prompt,),
            max_tokens=[self._checked_limit(max_tokens, prompt, default=room)],
            echoed=[""],
            top_logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
            prompt_logprobs=fields.prompt_logprobs,
            tool_use=tool_use,
        )

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.settings.model_name:
            raise UnknownModel(name=name, served=self.settings.model_name)

    def _check(self, fields: GenerationFields) -> None:
        self.check_model(fields.model)
        if field := unsupported(fields):
            raise RequestError(
                f"{field}: this value would change the answer and is not supported here; "
                "leave the field out",
                param=field,
            )
        if fields.prompt_logprobs is not None and fields.stream:
            raise RequestError(
                "prompt_logprobs are not in streams: set stream to false, or use echo with "
                "logprobs",
                param="prompt_logprobs",
            )
        names = ignored(fields)
        if names and self.limits is not None and self.limits.strict_fields:
            raise RequestError(
                f"{names[0]}: no such field; leave it out, or set limits.strict_fields to false",
                param=names[0],
            )
        if names:
            logger.info("fields of a request were ignored: names=%s", ascii(names)[:200])

    def _check_choices(self, num_prompts: int, *, n: int) -> None:
        limits = self.limits
        if limits is not None and num_prompts * n > limits.max_choices:
            raise RequestError(
                f"found {num_prompts} prompts x n={n}, {num_prompts * n} texts, expected at most "
                f"{limits.max_choices} in one request: send several requests, or raise "
                "limits.max_choices",
                param="n" if n > 1 else "prompt",
            )

    def _check_extras(self, num_extras: int) -> None:
        limits = self.limits
        if limits is not None and num_extras > limits.max_answer_extras:
            raise RequestError(
                f"the answer may have {num_extras} log-probabilities and repeated prompt tokens, "
                f"expected at most {limits.max_answer_extras}: lower max_tokens, n, logprobs or "
                "top_logprobs, leave out echo and return_token_ids, or raise "
                "limits.max_answer_extras"
            )

    def _tokens_of(self, fields: CompletionFields, prompt: str | Sequence[int]) -> Prompt:
        if isinstance(prompt, str):
            tokens = self.codec.encode(prompt, add_special_tokens=fields.add_special_tokens)
        else:
            check_ids(prompt, self.codec, param="prompt")
            tokens = tuple(TokenId(token) for token in prompt)
        if not tokens:
            raise RequestError("the prompt is empty: send at least one token", param="prompt")
        self._check_length(tokens, param="prompt")
        return tokens

    def check_count(self, tokens: Sequence[int], *, param: str) -> None:
        """Raises RequestError if these are more tokens than are listed in one answer or body."""
        limit = max(self.max_model_len, _MAX_LISTED_TOKENS)
        if len(tokens) > limit:
            raise RequestError(
                f"{param}: found {len(tokens)} tokens, expected at most {limit}: send a part",
                param=param,
            )

    def _check_length(self, prompt: Prompt, *, param: str) -> None:
        if len(prompt) >= self.max_model_len:
            error = PromptTooLong(num_tokens=len(prompt), limit=self.max_model_len - 1)
            error.param = param
            raise error

    def _checked_limit(self, max_tokens: int | None, prompt: Prompt, *, default: int) -> int:
        room = self.max_model_len - len(prompt)
        if max_tokens is not None and max_tokens > room:
            raise RequestError(
                f"max_tokens is {max_tokens}, but the prompt's {len(prompt)} tokens leave {room} "
                f"of the model's {self.max_model_len}: ask for at most {room}",
                param="max_tokens",
            )
        return min(default if max_tokens is None else max_tokens, room)

    def _echoed(self, fields: CompletionFields, prompt: str | Sequence[int]) -> str:
        if not fields.echo:
            return ""
        if isinstance(prompt, str):
            return prompt
        return self.codec.decode([TokenId(token) for token in prompt])

    def _flush_interval_s(self, fields: GenerationFields) -> float | None:
        """Returns how long tokens of a request may gather before they are sent to this process."""
        if not fields.stream:
            return None
        if self.settings.pace is not None:
            return 0.0
        interval_s = fields.stream_options.flush_interval_s
        if interval_s is None:
            interval_s = self.settings.flush_interval_s
        # The engine goes on until the text with the stop string has come here.
        return None if fields.stop and interval_s else interval_s

    def _prepared(
        self,
        fields: GenerationFields,
        *,
        context: RequestContext,
        start: StreamStart,
        prompts: tuple[Prompt, ...],
        max_tokens: Sequence[int],
        echoed: Sequence[str],
        top_logprobs: int | None,
        prompt_logprobs: int | None,
        tool_use: ToolUse | None = None,
    ) -> Prepared:
        constraint = self._constraint(fields, tool_use)
        caller = ANYONE if context.permit is None else context.permit.key
        nonce = start.origin.nonce.hex()
        request_id = fields.request_id or start.origin.request_id or nonce
        response_id = response_id_of(fields.kind, request_id)
        window_s = 0.0 if start.event_ids is None else self.settings.resume_window_s
        seed = start.origin.seed if fields.seed is None else fields.seed
        sampling = sampling_params(
            fields,
            self.codec,
            max_tokens=min(max_tokens),
            top_logprobs=top_logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=None if constraint is None else constraint.grammar,
        )
        choices = [
            Choice(
                index=j * fields.n + i,
                prompt_index=j,
                request=Request(
                    request_id=RequestId(f"{response_id}-{nonce[:16]}-{j * fields.n + i}"),
                    prompt=prompt,
                    sampling=structs.replace(
                        sampling, seed=choice_seed(seed, i), max_tokens=max(max_tokens[j], 1)
                    ),
                    speculation=fields.speculation.params,
                    workload=self._workload(fields, context),
                    traceparent=context.traceparent,
                    resume_window_s=window_s,
                    flush_interval_s=self._flush_interval_s(fields),
                    resumption=start.resumption,
                    caller="" if caller is ANYONE else caller.name,
                    weight=caller.weight,
                    priority=caller.priority + fields.priority,
                    cache_salt=self._cache_salt(fields, context.permit),
                ),
            )
            for j, prompt in enumerate(prompts)
            for i in range(fields.n)
        ]
        if constraint is not None:
            with naming(constraint.param):
                self._grammars.require_end(sampling.stop_token_ids)
        num_extras = sum(_num_extras(choice.request, fields) for choice in choices)
        self._check_extras(num_extras)
        return Prepared(
            kind=fields.kind,
            request_id=request_id,
            model=self.settings.model_name,
            created_unix_s=start.origin.created_unix_s,
            arrived_s=time.monotonic(),
            seed=seed,
            prompts=prompts,
            echoed=tuple(echoed),
            choices=tuple(choices),
            num_extras=num_extras,
            text=TextOptions(
                stops=fields.stops,
                include_stop_in_output=fields.include_stop_str_in_output,
                skip_special_tokens=fields.skip_special_tokens,
                shown_special_tokens=self._marks if tool_use is not None else frozenset(),
                drops_tokens=fields.max_tokens == 0,
            ),
            tool_use=tool_use,
            max_draft_tokens=self._draft_ceiling(fields),
            options=AnswerOptions.of(fields),
            warnings=_warnings(fields, constraint),
            shown=start.shown,
            context=context,
            states_length=fields.states_length,
            event_ids=start.event_ids,
        )

    def new_grammar(self, fields: GenerationFields) -> AskedGrammar | None:
        """Returns the grammar of a request; None where it was compiled before.

        Raises RequestError for one that cannot be used.
        """
        tool_use = self._tool_use(fields) if isinstance(fields, ChatFields) else None
        constraint = self._constraint(fields, tool_use)
        return (
            None
            if constraint is None or self._grammars.is_valid(constraint.grammar)
            else constraint
        )

    def compile_grammar(self, constraint: AskedGrammar) -> None:
        """Compiles a grammar, which takes up to some seconds; pipelines compile what passes.

        Raises RequestError for one that cannot be used.
        """
        with naming(constraint.param):
            self._grammars.check(constraint.grammar)

    def _constraint(
        self, fields: GenerationFields, tool_use: ToolUse | None
    ) -> AskedGrammar | None:
        constraint = asked_grammar(fields)
        if constraint is None or tool_use is None:
            forced = None if tool_use is None else tool_use.grammar
            notes = () if tool_use is None else tool_use.notes
            return constraint if forced is None else AskedGrammar("tools", forced, notes)
        raise RequestError(
            f"found {constraint.param} and tools, expected one of them: leave one out, or set "
            "tool_choice to none",
            param=constraint.param,
        )

    def _tool_use(self, fields: ChatFields) -> ToolUse | None:
        return tool_use_of(fields, form=self._tool_format, special_id=self._special_id)

    def _special_id(self, text: str) -> TokenId | None:
        """Returns the special token that a text is; None where it is written as text."""
        tokens = self.codec.encode(text, add_special_tokens=False)
        is_special = len(tokens) == 1 and tokens[0] in self.codec.special_token_ids
        return tokens[0] if is_special else None

    def _workload(self, fields: GenerationFields, context: RequestContext) -> str:
        return workload_of(
            fields.speculation.workload or context.workload,
            kind=fields.kind,
            temperature=fields.temperature,
            by_temperature=self.settings.workloads_by_temperature,
        )

    def _cache_salt(self, fields: GenerationFields, permit: Permit | None) -> str:
        salt = fields.cache_salt or ""
        if permit is None or permit.key is ANYONE or self.settings.share_prefix_cache:
            return salt
        return f"{permit.key.name}\n{salt}"  # a name has no line break

    def _draft_ceiling(self, fields: GenerationFields) -> int | None:
        speculation = fields.speculation
        if speculation.mode == "off":
            return None
        if speculation.max_draft_tokens is None:
            return self.settings.max_draft_tokens
        return min(speculation.max_draft_tokens, self.settings.max_draft_tokens)


def _warnings(fields: GenerationFields, constraint: AskedGrammar | None) -> tuple[str, ...]:
    unknown = (
        f"the field {name[:_LISTED_CHARS]!r} is not known and was ignored"
        for name in ignored(fields)
    )
    return (*unknown, *(() if constraint is None else constraint.notes))[:_MAX_WARNINGS]


def _num_extras(request: Request, fields: GenerationFields) -> int:
    num_top = request.sampling.top_logprobs
    num_logprobs = 0 if num_top is None else request.sampling.max_tokens * (1 + num_top)
    repeats_prompt = fields.return_token_ids or (
        isinstance(fields, CompletionFields) and fields.echo
    )
    num_top = request.sampling.prompt_logprobs
    num_logprobs += 0 if num_top is None else len(request.prompt) * (1 + num_top)
    return num_logprobs + (len(request.prompt) if repeats_prompt else 0)


def _more(first: int | None, second: int | None) -> int | None:
    """Returns the larger of two numbers of alternatives; None where both are."""
    return max((count for count in (first, second) if count is not None), default=None)


def _chat_options(fields: ChatFields) -> dict[str, object]:
    """Returns the options of the chat template that a request asks for."""
    options = dict(fields.chat_template_kwargs)
    if "tools" in options:
        raise RequestError(
            "tools cannot be given to the chat template: send the field tools",
            param="chat_template_kwargs",
        )
    options["add_generation_prompt"] = fields.add_generation_prompt
    if fields.continue_final_message:
        if fields.add_generation_prompt:
            raise RequestError(
                "continue_final_message needs add_generation_prompt: false",
                param="continue_final_message",
            )
        options["continue_final_message"] = True
    return options
