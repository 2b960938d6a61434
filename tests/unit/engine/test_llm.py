"""The public API: text in, text out."""

import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from eesd_dist import LLM, EngineConfig, SamplingParams, SpeculationParams
from eesd_dist.errors import CheckpointError, PromptTooLong, RequestError
from eesd_dist.text import Tokenizer
from eesd_dist.text.grammars import one_of, regular_expression
from serve_app.config import BUNDLED_MODEL

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=24)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(BUNDLED_MODEL) as one:
        yield one


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_texts_come_in_the_order_of_the_prompts_and_do_not_depend_on_their_neighbours(
    llm: LLM, sampling: SamplingParams
) -> None:
    prompts = ["Tom has 3 apples.", "The capital", "1 2 3"]
    drafted = SpeculationParams(controller="fixed")  # other controllers may draft nothing
    together = llm.generate(prompts, sampling, speculation=drafted)
    alone = [llm.generate(prompt, sampling)[0] for prompt in prompts]
    assert [each.text for each in together] == [each.text for each in alone]
    plain = llm.generate(prompts, sampling, speculation=SpeculationParams(mode="off"))
    assert [each.token_ids for each in together] == [each.token_ids for each in plain]
    assert sum(each.statistics.num_accepted for each in together) > 0
    assert all(each.statistics.acceptance_rate is None for each in plain)


def test_a_stream_is_the_text_in_pieces(llm: LLM) -> None:
    (whole,) = llm.generate("Tom has 3 apples.", GREEDY)
    deltas = list(llm.stream("Tom has 3 apples.", GREEDY))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert deltas[-1].finish_reason == whole.finish_reason
    assert len(deltas) > 1


def test_a_reader_that_stops_leaves_nothing_behind(llm: LLM) -> None:
    for _ in llm.stream("Tom has", replace(GREEDY, max_tokens=200, seed=1), ignore_eos=True):
        break
    assert llm.generate("Tom has", GREEDY)[0].text


def test_a_stop_string_ends_a_text_and_is_named(llm: LLM) -> None:
    (whole,) = llm.generate("Tom has 3 apples.", GREEDY, ignore_eos=True)
    middle = whole.text[len(whole.text) // 2 :][:3]
    (cut,) = llm.generate("Tom has 3 apples.", GREEDY, stop=[middle], ignore_eos=True)
    assert cut.text == whole.text[: whole.text.index(middle)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", middle)
    streamed = llm.stream("Tom has 3 apples.", GREEDY, stop=[middle], ignore_eos=True)
    assert "".join(delta.text for delta in streamed) == cut.text


def test_a_conversation_is_what_its_template_makes_of_it(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is 12 times 7?"}]
    tokens = Tokenizer.load(BUNDLED_MODEL).encode_chat(messages, add_generation_prompt=True)
    (answer,) = llm.chat(messages, GREEDY)
    assert answer.prompt_token_ids == tokens
    (raw,) = llm.generate(tokens, GREEDY)
    both = llm.chat([messages, messages], GREEDY)
    assert {each.token_ids for each in (raw, *both)} == {answer.token_ids}
    assert {each.text for each in (raw, *both)} == {answer.text}
    assert "".join(delta.text for delta in llm.stream(messages, GREEDY)) == answer.text


def test_more_prompts_than_the_queue_takes_are_answered() -> None:
    config = EngineConfig.model_validate(
        {
            "model": {"path": str(BUNDLED_MODEL)},
            "scheduler": {"max_waiting": 2, "max_running": 2},
        }
    )
    with LLM(config) as llm:
        texts = llm.generate(["Tom"] * 9, replace(GREEDY, max_tokens=4))
        assert len({each.text for each in texts}) == 1
        assert len(texts) == 9


@pytest.mark.parametrize(
    ("sampling", "found"),
    [
        (SamplingParams(temperature=-1.0), "temperature is -1.0: give 0 or more"),
        (SamplingParams(temperature=math.nan), "temperature is nan"),
        (SamplingParams(top_p=1.5), "top_p is 1.5: give 0 to 1"),
        (SamplingParams(repetition_penalty=0.0), "repetition_penalty is 0.0: give more than 0"),
        (SamplingParams(presence_penalty=math.inf), "presence_penalty is inf"),
        (SamplingParams(logit_bias=((3, math.nan),)), "logit_bias of 3 is nan"),
        (SamplingParams(max_tokens=0), "max_tokens is 0: ask for at least 1"),
    ],
)
def test_parameters_out_of_range_are_refused(
    llm: LLM, sampling: SamplingParams, found: str
) -> None:
    with pytest.raises(RequestError, match=found):
        llm.generate("Tom", sampling)
    assert llm.generate("Tom", GREEDY)[0].text


def test_log_probabilities_of_a_prompt_are_one_for_each_token_but_the_first(llm: LLM) -> None:
    (found,) = llm.generate("Tom has", replace(GREEDY, prompt_logprobs=2))
    assert len(found.prompt_logprobs) == len(found.prompt_token_ids) - 1
    assert all(each.logprob < 0 and len(each.top) == 2 for each in found.prompt_logprobs)
    assert llm.generate("Tom has", GREEDY)[0].prompt_logprobs == ()


def test_a_grammar_that_needs_too_much_work_is_an_error_and_no_short_text(llm: LLM) -> None:
    tokenizer = Tokenizer.load(BUNDLED_MODEL)
    (a,) = tokenizer.encode("a", add_special_tokens=False)
    deep = SamplingParams(
        max_tokens=200,
        logit_bias=((a, 100.0),),
        grammar=regular_expression("(?:(?:(?:a{0,100}){0,100}){0,100})b"),
    )
    with pytest.raises(RequestError, match="more work than is allowed"):
        llm.generate("x", deep)
    with pytest.raises(RequestError, match="more work than is allowed"):
        list(llm.stream("x", deep))
    yes = SamplingParams(max_tokens=9, grammar=one_of(["yes", "no"]))
    assert llm.generate("x", yes)[0].text in ("yes", "no")


def test_a_prompt_that_is_too_long_ends_the_call_and_nothing_else(llm: LLM) -> None:
    with pytest.raises(PromptTooLong):
        llm.generate(["Tom", "apples " * 20_000], GREEDY)
    assert len(llm.generate(["Tom", "Anna"], GREEDY)) == 2


def test_a_folder_without_a_model_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        LLM(tmp_path)


def test_the_package_loads_no_torch_until_the_engine_is_asked_for() -> None:
    program = (
        "import sys, eesd_dist; eesd_dist.SamplingParams(); assert 'torch' not in sys.modules\n"
        "eesd_dist.LLM; assert 'torch' in sys.modules\n"
        "try: eesd_dist.nothing\n"
        "except AttributeError as error: assert 'nothing' in str(error)\n"
        "else: raise SystemExit(1)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
