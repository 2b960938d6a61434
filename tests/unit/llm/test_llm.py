"""The public API: text in, text out."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

import eesd_dist
from eesd_dist import LLM, EngineConfig, SamplingParams, SpeculationParams, StructuredOutputsParams
from eesd_dist.bundled_model import BUNDLED_MODEL
from eesd_dist.errors import CheckpointError, ConfigError, EngineError, PromptTooLong, RequestError
from eesd_dist.text import Tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=24)
WHOLE = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=4)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(BUNDLED_MODEL) as engine:
        yield engine


def _text(llm: LLM, prompt: str, params: SamplingParams) -> str:
    (output,) = llm.generate(prompt, params)
    return output.outputs[0].text


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_texts_come_in_the_order_of_the_prompts_and_do_not_depend_on_their_neighbours(
    llm: LLM, params: SamplingParams
) -> None:
    prompts = ["Tom has 3 apples.", "The capital", "1 2 3"]
    drafted = SpeculationParams(controller="fixed")  # other controllers may draft nothing
    batch = llm.generate(prompts, params, speculation=drafted)
    assert [output.prompt for output in batch] == prompts
    texts = [output.outputs[0] for output in batch]
    assert [output.text for output in texts] == [_text(llm, prompt, params) for prompt in prompts]
    plain = llm.generate(prompts, params, speculation=SpeculationParams(mode="off"))
    assert [output.token_ids for output in texts] == [
        output.outputs[0].token_ids for output in plain
    ]
    assert sum(output.statistics.num_accepted for output in texts) > 0
    assert all(output.outputs[0].statistics.acceptance_rate is None for output in plain)


def test_a_stream_is_the_text_in_pieces(llm: LLM) -> None:
    (whole,) = llm.generate("Tom has 3 apples.", GREEDY)
    deltas = list(llm.stream("Tom has 3 apples.", GREEDY))
    assert "".join(delta.text for delta in deltas) == whole.outputs[0].text
    assert deltas[-1].finish_reason == whole.outputs[0].finish_reason
    assert len(deltas) > 1


def test_a_reader_that_stops_leaves_nothing_behind(llm: LLM) -> None:
    for _ in llm.stream("Tom has", SamplingParams(max_tokens=200, ignore_eos=True)):
        break
    assert _text(llm, "Tom has", GREEDY)


def test_a_stop_string_ends_a_text_and_is_named(llm: LLM) -> None:
    whole = _text(llm, "Tom has 3 apples.", WHOLE)
    middle = whole[len(whole) // 2 :][:3]
    stopped = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, stop=[middle])
    (cut,) = llm.generate("Tom has 3 apples.", stopped)[0].outputs
    assert cut.text == whole[: whole.index(middle)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", middle)
    streamed = llm.stream("Tom has 3 apples.", stopped)
    assert "".join(delta.text for delta in streamed) == cut.text


def test_a_conversation_is_what_its_template_makes_of_it(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is 12 times 7?"}]
    tokens = Tokenizer.load(BUNDLED_MODEL).encode_chat(messages, add_generation_prompt=True)
    (answer,) = llm.chat(messages, GREEDY)
    assert answer.prompt_token_ids == list(tokens)
    (raw,) = llm.generate(tokens, GREEDY)
    both = llm.chat([messages, messages], GREEDY)
    (text,) = answer.outputs
    assert {output.outputs[0].token_ids for output in (raw, *both)} == {text.token_ids}
    assert {output.outputs[0].text for output in (raw, *both)} == {text.text}
    assert "".join(delta.text for delta in llm.stream(messages, GREEDY)) == text.text


def test_a_conversation_continues_its_last_message_and_knows_tools(llm: LLM) -> None:
    messages = [
        {"role": "user", "content": "What is 12 times 7?"},
        {"role": "assistant", "content": "It is"},
    ]
    (answer,) = llm.chat(messages, SHORT, add_generation_prompt=False, continue_final_message=True)
    assert answer.prompt is not None
    assert answer.prompt.endswith("It is")
    tools = [{"type": "function", "function": {"name": "clock", "parameters": {}}}]
    assert llm.chat(messages[:1], SHORT, tools=tools)[0].outputs[0].token_ids


def test_more_prompts_than_the_queue_takes_are_answered() -> None:
    with LLM(BUNDLED_MODEL, max_waiting=2, max_running=2) as llm:
        texts = llm.generate(["Tom"] * 9, SHORT, use_tqdm=False)
    assert len({output.outputs[0].text for output in texts}) == 1
    assert len(texts) == 9


def test_each_prompt_has_parameters_of_its_own(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (1, 5, 3)]
    outputs = llm.generate(["Tom", "Tom", "Tom"], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 5, 3]
    with pytest.raises(RequestError, match=r"found 3 for 2 prompts"):
        llm.generate(["Tom", "Tom"], params)
    with pytest.raises(RequestError, match=r"found dict, expected SamplingParams"):
        llm.generate("Tom", {"temperature": 0.0})  # type: ignore[arg-type]


def test_samples_without_a_seed_differ_and_their_seed_gives_them_again(llm: LLM) -> None:
    outputs = llm.generate(["Tom has"] * 8, SamplingParams(max_tokens=16))
    texts = [output.outputs[0].text for output in outputs]
    assert len(set(texts)) == 8
    params = [SamplingParams(max_tokens=16, seed=output.seed) for output in outputs]
    assert [output.outputs[0].text for output in llm.generate(["Tom has"] * 8, params)] == texts


def test_a_seed_of_the_engine_is_the_seed_of_all_texts_that_have_none() -> None:
    texts = []
    for seed in (3, 3, 4):
        with LLM(BUNDLED_MODEL, seed=seed) as llm:
            outputs = llm.generate(["Tom has"] * 2, SamplingParams(max_tokens=12))
            texts.append([output.outputs[0].text for output in outputs])
    assert texts[0] == texts[1] != texts[2]


def test_several_texts_of_a_prompt_the_first_of_which_is_that_of_one(llm: LLM) -> None:
    (single,) = llm.generate("Tom has", SamplingParams(seed=5, max_tokens=12))
    (three,) = llm.generate("Tom has", SamplingParams(seed=5, max_tokens=12, n=3))
    assert [sample.index for sample in three.outputs] == [0, 1, 2]
    assert three.outputs[0].text == single.outputs[0].text
    assert len({sample.text for sample in three.outputs}) == 3


def test_log_probabilities_of_a_prompt_are_one_for_each_token_but_the_first(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=2, logprobs=1)
    (output,) = llm.generate("Tom has", params)
    assert output.prompt_logprobs is not None
    first, *entries = output.prompt_logprobs
    assert first is None
    for token, entry in zip(output.prompt_token_ids[1:], entries, strict=True):
        assert entry is not None
        assert entry[token].logprob < 0
        assert len(entry) in (2, 3)
    (text,) = output.outputs
    assert text.logprobs is not None
    own = [entry[token] for entry, token in zip(text.logprobs, text.token_ids, strict=True)]
    assert [entry.rank for entry in own] == [1, 1, 1]
    assert "".join(entry.decoded_token for entry in own) == text.text
    assert text.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in own))
    (without,) = llm.generate("Tom has", SHORT)
    assert without.prompt_logprobs is None
    assert without.outputs[0].logprobs is None


def test_a_grammar_that_needs_too_much_work_is_an_error_and_no_short_text(llm: LLM) -> None:
    (a,) = llm.get_tokenizer().encode("a", add_special_tokens=False)
    deep = SamplingParams(
        max_tokens=200,
        logit_bias={a: 100.0},  # type: ignore[dict-item]
        structured_outputs=StructuredOutputsParams(regex="(?:(?:(?:a{0,100}){0,100}){0,100})b"),
    )
    with pytest.raises(RequestError, match="more work than is allowed"):
        llm.generate("x", deep)
    with pytest.raises(RequestError, match="more work than is allowed"):
        list(llm.stream("x", deep))
    assert "more work than is allowed" in str(llm.generate(["x"], deep)[0].error)
    yes = SamplingParams(
        max_tokens=9, structured_outputs=StructuredOutputsParams(choice=["yes", "no"])
    )
    assert _text(llm, "x", yes) in ("yes", "no")


@pytest.mark.parametrize(
    "bad", ["apples " * 20_000, "", 3.5, {"text": "x"}, {"prompt_token_ids": [2**31]}, [-1], None]
)
def test_a_bad_prompt_among_others_is_an_error_on_its_own_output(llm: LLM, bad: object) -> None:
    first, wrong, last = llm.generate(["Tom", bad, "Anna"], SHORT)  # type: ignore[list-item]
    assert first.outputs[0].text
    assert last.outputs[0].text == _text(llm, "Anna", SHORT)
    assert wrong.error is not None
    with pytest.raises(RequestError, match="prompt"):
        wrong.outputs  # noqa: B018


def test_a_prompt_that_is_too_long_by_itself_is_raised(llm: LLM) -> None:
    with pytest.raises(PromptTooLong):
        llm.generate("apples " * 20_000, GREEDY)
    assert _text(llm, "Anna", GREEDY)


def test_a_folder_without_a_model_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        LLM(tmp_path)


def test_nothing_goes_on_after_the_end() -> None:
    llm = LLM(BUNDLED_MODEL)
    deltas = llm.stream("Tom has", SamplingParams(max_tokens=200, ignore_eos=True))
    next(deltas)
    llm.close()
    llm.close()
    with pytest.raises(EngineError, match="closed"):
        next(deltas)
    with pytest.raises(EngineError, match="closed"):
        llm.generate("Tom")
    with pytest.raises(EngineError, match="closed"):
        llm.chat([{"role": "user", "content": "x"}])
    with pytest.raises(EngineError, match="closed"):
        next(llm.stream("Tom"))


def test_settings_are_the_configurations_and_vllms_names_are_known() -> None:
    settings = {"dtype": "float32", "max_model_len": 64, "numerics": "fast", "max_num_seqs": 3}
    with LLM(str(BUNDLED_MODEL), tensor_parallel_size=1, trust_remote_code=True, **settings) as llm:  # type: ignore[arg-type]
        params = SamplingParams(max_tokens=None, ignore_eos=True)
        (output,) = llm.generate("Tom has", params)
        assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 64
    config = EngineConfig.model_validate({"model": {"path": BUNDLED_MODEL, "max_model_len": 64}})
    with LLM(config, max_running=1, kv_cache_dtype="bfloat16") as llm:
        assert len(llm.generate("Tom has", params)[0].outputs[0].token_ids) == 62


def test_it_has_all_cores_and_their_number_changes_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    texts = []
    settings: tuple[dict[str, int], ...] = ({}, {"num_threads": 1}, {"num_threads": 3})
    for stated in settings:
        with LLM(BUNDLED_MODEL, **stated) as llm:
            expected = stated.get("num_threads", psutil.cpu_count(logical=False))
            assert torch.get_num_threads() == expected
            outputs = llm.generate(["Tom has 3 apples.", "1 2 3"] * 4, SAMPLED)
            texts.append([output.outputs[0].token_ids for output in outputs])
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with LLM(BUNDLED_MODEL):
        assert torch.get_num_threads() == 3
    torch.set_num_threads(1)
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"tensor_parallel_size": 8}, r"expected 1: .*`eesd serve --verify-tp`"),
        ({"pipeline_parallel_size": 2}, r"expected 1: .*`eesd serve`"),
        ({"quantization": "awq"}, r"found 'awq', expected None"),
        ({"speculative_config": {}}, r"drafts with the model's own first layers"),
        ({"max_model_length": 5}, r"did you mean max_model_len\?"),
        ({"wings": 2}, r"wings: .* docs/configuration.md lists"),
        ({"dtype": "half"}, r"model.dtype: Input should be 'auto'"),
    ],
)
def test_what_one_process_does_not_do_is_refused_with_advice(
    settings: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        LLM(BUNDLED_MODEL, **settings)


def test_the_package_shows_its_names_and_loads_no_torch_until_the_engine_is_asked_for() -> None:
    assert set(eesd_dist.__all__) <= set(dir(eesd_dist))
    program = (
        "import sys, eesd_dist; eesd_dist.SamplingParams(); assert 'torch' not in sys.modules\n"
        "eesd_dist.LLM; assert 'torch' in sys.modules\n"
        "try: eesd_dist.nothing\n"
        "except AttributeError as error: assert 'nothing' in str(error)\n"
        "else: raise SystemExit(1)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
