"""Texts with a grammar match it, and speculation changes none of their tokens."""

import dataclasses
import itertools
import json
import random
import re
from typing import Any

import jsonschema
import pytest
from msgspec import structs

from eesd_dist.config import DType, SpeculationConfig, TreeConfig
from eesd_dist.engine.local import Generation, LocalEngine
from eesd_dist.errors import RequestError
from eesd_dist.text.grammars import any_json, json_schema, one_of, regular_expression, rules
from eesd_dist.types import (
    FinishReason,
    Request,
    RequestId,
    SamplingParams,
    SpeculationParams,
    TokenId,
    TreeShape,
)
from tests.support.json_codec import JsonCodec, json_grammars
from tests.unit.engine.conftest import MakeConfig
from tests.unit.engine.test_exactness import prompts, texts

PLAIN = SpeculationParams(mode="off")
CODEC = JsonCodec()
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", "cd"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GRAMMARS = {
    "object": json_schema(SCHEMA, whitespace=None),
    "blanks": json_schema(SCHEMA),
    "any object": any_json(),
    "pattern": regular_expression(r"[a-c]{2,9}(, [0-9]{1,3})*\."),
    "choice": one_of(["yes", "no", "no one, or all"]),
    "rules": rules('root ::= "a" root "b" | "c"'),
}
WORDS = tuple((first, second) for first in range(3, 60) for second in range(3, 60, 2))
"""Half of all pairs of the likelier tokens."""
CONSTRAINTS: dict[str, dict[str, Any]] = {
    **{name: {"grammar": grammar} for name, grammar in GRAMMARS.items()},
    "few tokens": {"allowed_token_ids": tuple(range(5, 90, 7))},
    "bad words": {"bad_words": ((9,), *WORDS)},
    "all": {
        "grammar": GRAMMARS["any object"],
        "allowed_token_ids": (2, *range(3, 40)),
        "bad_words": ((5, 6), (6, 5)),
    },
}
SAMPLING = {
    "greedy": SamplingParams(temperature=0.0),
    "warm": SamplingParams(temperature=0.8),
    "filtered": SamplingParams(temperature=1.0, top_p=0.9, top_k=20, min_p=0.02),
    "penalised": SamplingParams(
        temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.5, top_logprobs=2
    ),
}


def requests(
    names: list[str], sampling: SamplingParams, speculation: SpeculationParams, *, tokens: int = 48
) -> list[Request]:
    """One request for each name of a constraint; an empty name has none."""
    return [
        Request(
            request_id=RequestId(f"{i} {name}"),
            prompt=prompt,
            sampling=structs.replace(
                sampling,
                seed=70 + i,
                max_tokens=tokens,
                stop_token_ids=(2,),
                **CONSTRAINTS.get(name, {}),
            ),
            speculation=speculation,
        )
        for i, (name, prompt) in enumerate(zip(names, prompts(len(names)), strict=True))
    ]


def text_of(generation: Generation) -> str:
    tokens = generation.tokens
    if generation.finish_reason is FinishReason.STOP:
        assert tokens[-1] == 2
        tokens = tokens[:-1]
    assert 2 not in tokens
    return CODEC.decode(tokens)


def matches(name: str, text: str, generated: list[TokenId]) -> bool:
    """Judges without the library that made the text."""
    if name in ("object", "blanks"):
        jsonschema.validate(json.loads(text), SCHEMA)
        return True
    if name == "any object":
        return isinstance(json.loads(text), dict)
    if name == "pattern":
        return re.fullmatch(r"[a-c]{2,9}(, [0-9]{1,3})*\.", text) is not None
    if name == "choice":
        return text in ("yes", "no", "no one, or all")
    if name == "few tokens":
        return set(generated) <= set(range(5, 90, 7))
    if name == "bad words":
        return 9 not in generated and not set(itertools.pairwise(generated)) & set(WORDS)
    if name == "all":
        return set(generated) <= {2, *range(3, 40)} and not (
            set(itertools.pairwise(generated)) & {(5, 6), (6, 5)}
        )
    half = len(text) // 2
    return text == "a" * half + "c" + "b" * half


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head", ["always", "never", "truncated"])
@pytest.mark.parametrize("name", SAMPLING)
def test_texts_match_their_grammars_and_no_controller_changes_a_token(
    name: str, head: str, dtype: DType, make_config: MakeConfig
) -> None:
    engine = LocalEngine(make_config(head, dtype=dtype), grammars=json_grammars())
    grammars = [*CONSTRAINTS, ""]
    plain = engine.generate(requests(grammars, SAMPLING[name], PLAIN))
    num_ended = 0
    for grammar, generation in zip(grammars[:-1], plain, strict=False):
        is_over = generation.finish_reason is FinishReason.STOP
        num_ended += is_over
        if is_over or grammar not in GRAMMARS:
            assert matches(grammar, text_of(generation), generation.tokens), grammar
    assert num_ended >= 3
    for controller in ("fixed", "beta", "calibration", "goodput"):
        speculation = SpeculationParams(controller=controller)
        drafted = engine.generate(requests(grammars, SAMPLING[name], speculation))
        assert texts(drafted) == texts(plain), controller
        assert [g.finish_reason for g in drafted] == [g.finish_reason for g in plain]
        assert [g.logprobs for g in drafted] == [g.logprobs for g in plain]
    engine.engine.check()


@pytest.mark.parametrize("shape", ["static", "dynamic"])
def test_no_tree_changes_a_token(shape: TreeShape, make_config: MakeConfig) -> None:
    speculation = SpeculationConfig(
        max_draft_tokens=5,
        fixed_length=4,
        learn_costs=False,
        tree=TreeConfig(shape=shape, widths=(3, 2, 1)),
    )
    engine = LocalEngine(
        make_config("sometimes", speculation=speculation), grammars=json_grammars()
    )
    for sampling in SAMPLING.values():
        plain = engine.generate(requests([*CONSTRAINTS, ""], sampling, PLAIN))
        drafted = engine.generate(
            requests([*CONSTRAINTS, ""], sampling, SpeculationParams(controller="fixed"))
        )
        assert texts(drafted) == texts(plain)
        assert max(max(g.drafted) for g in drafted) > (4 if shape == "static" else 1)


def test_an_allowed_draft_is_accepted(make_config: MakeConfig) -> None:
    """The head that always agrees is masked as the target is."""
    engine = LocalEngine(make_config("always"), grammars=json_grammars())
    drafted = engine.generate(
        requests([*CONSTRAINTS], SAMPLING["warm"], SpeculationParams(controller="fixed"))
    )
    for generation in drafted:
        assert generation.accepted == generation.drafted or (
            generation.accepted[:-1] == generation.drafted[:-1]  # the last ends with the text
        )


def test_rejection_sampling_obeys_grammars(make_config: MakeConfig) -> None:
    speculation = SpeculationConfig(max_draft_tokens=5, learn_costs=False, acceptance="rejection")
    for head in ("sometimes", "truncated"):
        engine = LocalEngine(make_config(head, speculation=speculation), grammars=json_grammars())
        for generation, name in zip(
            engine.generate(
                requests([*CONSTRAINTS], SAMPLING["warm"], SpeculationParams(controller="fixed"))
            ),
            CONSTRAINTS,
            strict=True,
        ):
            text = text_of(generation)
            if generation.finish_reason is FinishReason.STOP:
                assert matches(name, text, generation.tokens)


def test_a_text_goes_on_where_it_was_interrupted(make_config: MakeConfig) -> None:
    engine = LocalEngine(make_config("sometimes"), grammars=json_grammars())
    batch = requests([*CONSTRAINTS], SAMPLING["warm"], SpeculationParams())
    whole = engine.generate(batch)
    for at in (1, 4):
        suffixes = engine.generate(
            [
                dataclasses.replace(request, generated=tuple(generation.tokens[:at]))
                for request, generation in zip(batch, whole, strict=True)
                if len(generation.tokens) > at
            ]
        )
        assert texts(suffixes) == [g.tokens[at:] for g in whole if len(g.tokens) > at]


def test_preempted_texts_are_the_same(make_config: MakeConfig) -> None:
    plain = LocalEngine(make_config("sometimes"), grammars=json_grammars())
    batch = requests([*CONSTRAINTS, ""] * 2, SAMPLING["warm"], SpeculationParams())
    expected = texts(plain.generate(batch))
    small = LocalEngine(make_config("sometimes", num_pages=14), grammars=json_grammars())
    assert texts(small.generate(batch)) == expected
    assert small.engine.load().num_preemptions > 0


def test_others_of_the_batch_do_not_notice(make_config: MakeConfig) -> None:
    engine = LocalEngine(make_config("sometimes"), grammars=json_grammars())
    batch = requests(["", "object", "", "pattern"], SAMPLING["warm"], SpeculationParams())
    expected = [engine.generate([request])[0].tokens for request in batch]
    assert texts(engine.generate(batch)) == expected


def test_a_grammar_that_needs_too_much_work_ends_its_text_with_the_reason(
    make_config: MakeConfig,
) -> None:
    engine = LocalEngine(make_config("sometimes"), grammars=json_grammars())
    other, deep = requests(["", "choice"], SAMPLING["warm"], SpeculationParams())
    pattern = regular_expression("(?:(?:(?:a{0,100}){0,100}){0,100})b")
    deep = dataclasses.replace(
        deep,
        sampling=structs.replace(
            deep.sampling, grammar=pattern, logit_bias=((CODEC.encode("a")[0], 90.0),)
        ),
    )
    expected = engine.generate([other])[0].tokens
    emissions = list(engine.stream([other, deep]))
    (last,) = (e for e in emissions if e.request_id == deep.request_id and e.finish_reason)
    assert last.finish_reason is FinishReason.ABORT
    assert last.error is not None
    assert "lexer error" in last.error
    deep_emissions = [e for e in emissions if e.request_id == deep.request_id]
    assert all(token == CODEC.encode("a")[0] for e in deep_emissions for token in e.tokens)
    assert [t for e in emissions if e.request_id == other.request_id for t in e.tokens] == expected
    engine.engine.check()
    assert engine.generate([other])[0].tokens == expected


def test_texts_that_exhaust_the_states_of_a_grammar_do_not_fail_each_other() -> None:
    """Each text makes a thousand states of this grammar; copies share 20,000."""
    grammars, rng = json_grammars(), random.Random(1)
    a, b = CODEC.encode("ab")
    texts_: list[list[int]] = [[] for _ in range(50)]
    matchers = [grammars.matcher(regular_expression("(a|b)*a(a|b){20}")) for _ in texts_]
    for _ in range(600):
        for matcher, text in zip(matchers, texts_, strict=True):
            mask = matcher.mask_after()
            assert all(mask[token >> 3] >> (token & 7) & 1 for token in (a, b))
            text.append(rng.choice((a, b)))
            matcher.read(text)
    assert [matcher.failure for matcher in matchers] == [None] * 50


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"grammar": regular_expression("(a")}, "unclosed group"),
        ({"grammar": json_schema({"not": {}, "uniqueItems": True})}, "uniqueItems"),
        ({"grammar": regular_expression("(a{1000}){1000}")}, "cannot be used: lexer error"),
        ({"grammar": "x" * (1 << 20)}, "expected at most"),
        ({"stop_token_ids": ()}, "leave out ignore_eos"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused(
    change: dict[str, object], reason: str, make_config: MakeConfig
) -> None:
    engine = LocalEngine(make_config("sometimes"), grammars=json_grammars())
    (request,) = requests(["choice"], SAMPLING["warm"], SpeculationParams())
    request = dataclasses.replace(
        request,
        sampling=structs.replace(request.sampling, **change),  # type: ignore[arg-type]
    )
    with pytest.raises(RequestError, match=re.escape(reason)):
        engine.generate([request])
    assert not engine.engine.has_work
