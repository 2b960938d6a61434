"""Masks: of grammars, lists of tokens and words to avoid, after texts and drafts."""

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from eesd_dist.engine.masks import ConstrainedText, Masks
from eesd_dist.errors import CheckpointError, RequestError
from eesd_dist.text.grammars import (
    GrammarCompiler,
    TokenMatcher,
    common,
    ends_of,
    json_schema,
    lists_of,
    masks_along,
    one_of,
    regular_expression,
    rules,
)
from eesd_dist.types import Request, RequestId, SamplingParams, TokenId
from tests.support.json_codec import JsonCodec, json_grammars

CODEC = JsonCodec()
END = 2


def matcher_of(grammar: str) -> TokenMatcher:
    return json_grammars().matcher(grammar)


GRAMMARS = json_grammars()


def text_of(
    sampling: SamplingParams, *, grammars: GrammarCompiler | None = GRAMMARS
) -> ConstrainedText | None:
    """A text with these parameters, of which the first mask is there."""
    masks = Masks(grammars=grammars, vocab_size=CODEC.vocab_size)
    request = Request(request_id=RequestId("text"), prompt=(TokenId(3),), sampling=sampling)
    text = masks.text_of(request)
    if text is not None:
        masks.admit(text)
        masks.begin_turn()
    return text


def constraint(**changes: object) -> ConstrainedText:
    text = text_of(SamplingParams(stop_token_ids=(END,), **changes))  # type: ignore[arg-type]
    assert text is not None
    return text


def bits(mask: bytes) -> set[int]:
    assert len(mask) == 12
    return {token for token in range(96) if mask[token >> 3] >> (token & 7) & 1}


def texts(mask: bytes) -> set[str]:
    return {CODEC.decode([token]) if token != END else "END" for token in bits(mask)}


def ids(text: str) -> tuple[int, ...]:
    return CODEC.encode(text)


def test_a_mask_has_all_tokens_that_can_follow_and_no_other() -> None:
    matcher = matcher_of(regular_expression("a{2}b?"))
    assert texts(matcher.mask_after()) == {"a"}
    assert texts(matcher.mask_after(ids("a"))) == {"a"}
    assert texts(matcher.mask_after(ids("aa"))) == {"b", "END"}
    assert texts(matcher.mask_after(ids("aab"))) == {"END"}


def test_tokens_of_several_characters_count_as_their_characters() -> None:
    matcher = matcher_of(one_of(["true", "trap", "null"]))
    assert texts(matcher.mask_after()) == {"t", "tr", "n", "nu"}
    (true,) = (token for token in range(96) if CODEC.decode([token]) == "tr")
    assert texts(matcher.mask_after([true])) == {"u", "ue", "a"}


def test_what_must_come_comes_in_the_tokenizers_own_tokens() -> None:
    matcher = matcher_of(json_schema({"const": True}))
    assert texts(matcher.mask_after()) == {"t"}  # as this tokenizer encodes, never in pairs


def test_a_draft_changes_nothing() -> None:
    rng = random.Random(3)
    matcher = matcher_of(rules('root ::= "a" root "b" | "c"'))
    text: list[int] = []
    for _ in range(30):
        before = matcher.mask_after()
        draft: list[int] = []
        for _ in range(5):
            allowed = sorted(bits(matcher.mask_after(draft)) - {END})
            draft.append(
                rng.choice(allowed) if allowed and rng.random() < 0.8 else rng.randrange(96)
            )
        assert matcher.mask_after() == before
        allowed = sorted(bits(before) - {END})
        if not allowed:
            break
        text.append(rng.choice(allowed))
        matcher.read(text)
        fresh = matcher_of(rules('root ::= "a" root "b" | "c"'))
        fresh.read(text)
        assert fresh.mask_after() == matcher.mask_after()
    assert matcher.failure is None


def test_after_a_token_that_is_not_allowed_nothing_is_excluded() -> None:
    matcher = matcher_of(one_of(["ab", "ac"]))
    assert bits(matcher.mask_after(ids("x"))) == set(range(96))
    assert texts(matcher.mask_after(ids("a"))) == {"b", "c"}


def test_masks_along_a_draft_end_with_the_first_token_that_is_not_allowed() -> None:
    matcher = matcher_of(one_of(["abc", "abd"]))
    masks = masks_along(matcher, ids("abxd"))
    assert [texts(mask) for mask in masks] == [{"a"}, {"b"}, {"c", "d"}]
    assert len(masks_along(matcher, ids("abd"))) == 4
    assert len(masks_along(matcher, ())) == 1


def test_allowed_tokens_are_the_only_ones() -> None:
    only = constraint(allowed_token_ids=(3, 31, 32, 95))
    for draft in ((), (3, 32)):
        assert bits(only.mask_after(draft)) == {3, 31, 32, 95}


def test_a_bad_word_is_not_completed_in_text_or_draft() -> None:
    a, b, c = ids("abc")
    words = constraint(bad_words=((a, b, c), (c, c)))
    assert bits(words.mask_after(())) == set(range(96))
    assert c not in bits(words.mask_after((a, b)))
    assert c in bits(words.mask_after((a, a)))
    words.extend((a, b))
    assert c not in bits(words.mask_after(()))
    assert a in bits(words.mask_after(()))
    assert c not in bits(words.mask_after((c,)))
    words.extend((b,))
    assert bits(words.mask_after(())) == set(range(96))
    words.extend((a,))
    assert c not in bits(words.mask_after((b,)))


def test_words_of_one_token_are_never_allowed() -> None:
    (a,) = ids("a")
    words = constraint(bad_words=((a,),))
    assert bits(words.mask_after(())) == set(range(96)) - {a}


@pytest.mark.parametrize("order", list(itertools.permutations("gab")))
def test_constraints_hold_together(order: Sequence[str]) -> None:
    a, _b, c = ids("abc")
    changes = {
        "g": {"grammar": regular_expression("[abc]{2}")},
        "a": {"allowed_token_ids": (a, c)},
        "b": {"bad_words": ((a, c),)},
    }
    merged = {name: value for key in order for name, value in changes[key].items()}
    merged_constraint = constraint(**merged)
    assert bits(merged_constraint.mask_after(())) == {a, c}
    assert bits(merged_constraint.mask_after((a,))) == {a}


def test_where_nothing_is_left_the_text_ends() -> None:
    a, b = ids("ab")
    merged_constraint = constraint(grammar=one_of(["ab"]), bad_words=((a, b),))
    assert bits(merged_constraint.mask_after(())) == {a}
    assert bits(merged_constraint.mask_after((a,))) == {END}


def test_no_parameters_constrain_nothing() -> None:
    sampling = SamplingParams(temperature=0.0, logit_bias=((3, 2.0),))
    assert text_of(sampling, grammars=None) is None


def test_a_grammar_needs_a_tokenizer_and_an_end() -> None:
    sampling = SamplingParams(grammar=one_of(["a"]), stop_token_ids=(END,))
    with pytest.raises(RequestError, match="no tokenizer"):
        text_of(sampling, grammars=None)
    endless = SamplingParams(grammar=one_of(["a"]), stop_token_ids=(7,))
    with pytest.raises(RequestError, match="leave out ignore_eos") as error:
        text_of(endless)
    assert error.value.param == "ignore_eos"

    class Endless(JsonCodec):
        eos_token_ids = ()

    with pytest.raises(RequestError, match="no end token"):
        GrammarCompiler(Endless).matcher(one_of(["a"]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"allowed_token_ids": (3, 96)}, "allowed_token_ids: found tokens from 3 to 96"),
        ({"allowed_token_ids": (-1,)}, "the vocabulary is 0 to 95"),
        ({"bad_words": ((3, 96),)}, "bad_words: found tokens from 3 to 96"),
        ({"bad_words": ((3,), ())}, "found a word without tokens"),
    ],
)
def test_tokens_that_do_not_exist_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        constraint(**changes)


def test_an_end_outside_the_vocabulary_ends_nothing() -> None:
    """Some checkpoints name one."""
    sampling = SamplingParams(stop_token_ids=(END, 500), allowed_token_ids=(5,), bad_words=((5,),))
    lists = lists_of(sampling, vocab_size=96)
    masks = [constraint_.mask_after() for constraint_ in lists]
    assert bits(common(masks, ends=ends_of(sampling, vocab_size=96))) == {END}


def test_a_vocabulary_that_cannot_be_read_is_a_matter_of_the_requests_with_grammars() -> None:
    def load() -> JsonCodec:
        raise CheckpointError(file=Path("x"), found="none", expected="one")

    grammars = GrammarCompiler(load)
    grammars.load()
    with pytest.raises(CheckpointError):
        grammars.matcher(one_of(["a"]))


def test_the_vocabulary_is_read_once() -> None:
    count = 0

    def load() -> JsonCodec:
        nonlocal count
        count += 1
        return JsonCodec()

    grammars = GrammarCompiler(load)
    grammars.load()
    assert count == 1
    for text in ("a", "b", "a"):
        grammars.matcher(one_of([text]))
    assert count == 1
