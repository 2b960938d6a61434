"""What users of vLLM type, with the import replaced."""

from collections.abc import Iterator

import pytest

from eesd_dist import LLM, SamplingParams, StructuredOutputsParams
from eesd_dist.bundled_model import BUNDLED_MODEL

SNIPPETS = {
    "hello": """
prompts = ["Hello, my name is", "The president of the United States is", "The capital of France is"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
outputs = llm.generate(prompts, sampling_params)
for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
assert len(outputs) == 3 and outputs[1].prompt == prompts[1]
""",
    "no parameters": """
(output,) = llm.generate("Tom has")
assert 0 < len(output.outputs[0].token_ids) <= 16
""",
    "keyword arguments": """
params = SamplingParams(max_tokens=3)
outputs = llm.generate(prompts=["Tom"], sampling_params=params, use_tqdm=False)
assert len(outputs[0].outputs[0].token_ids) == 3
""",
    "progress as the third argument": """
assert llm.generate(["Tom"], SamplingParams(max_tokens=1), False)
""",
    "greedy": """
params = SamplingParams(temperature=0, max_tokens=8)
first, second = (llm.generate("Tom", params)[0].outputs[0].text for _ in range(2))
assert first == second
""",
    "seed": """
params = SamplingParams(temperature=1.0, seed=42, max_tokens=8)
first, second = (llm.generate("Tom", params)[0].outputs[0].text for _ in range(2))
assert first == second
""",
    "diverse samples": """
texts = {o.outputs[0].text for o in llm.generate(["Once"] * 10, SamplingParams(max_tokens=12))}
assert len(texts) == 10
""",
    "n": """
output = llm.generate("Once", SamplingParams(n=4, temperature=1.0, max_tokens=8))[0]
assert [o.index for o in output.outputs] == [0, 1, 2, 3]
""",
    "stop": """
params = SamplingParams(temperature=0, max_tokens=40, stop=["."], include_stop_str_in_output=True)
output = llm.generate("Tom has 3 apples", params)[0].outputs[0]
assert output.finish_reason != "stop" or output.text.endswith(".")
""",
    "one stop text": """
assert llm.generate("Tom", SamplingParams(stop="\\n", max_tokens=4))[0].finished
""",
    "stop tokens": """
tokenizer = llm.get_tokenizer()
params = SamplingParams(stop_token_ids=[tokenizer.eos_token_id], max_tokens=4)
assert llm.generate("Tom", params)[0].outputs[0].finish_reason in ("stop", "length")
""",
    "top k off": """
assert llm.generate("Tom", SamplingParams(top_k=-1, max_tokens=2))[0].outputs
""",
    "all filters": """
params = SamplingParams(temperature=0.7, top_p=0.9, top_k=40, min_p=0.05, max_tokens=4)
assert llm.generate("Tom", params)[0].outputs
""",
    "penalties": """
params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1)
assert llm.generate("Tom", params)[0].outputs
""",
    "log-probabilities": """
output = llm.generate("Tom", SamplingParams(logprobs=5, max_tokens=3))[0].outputs[0]
for token_id, logprobs in zip(output.token_ids, output.logprobs):
    print(logprobs[token_id].logprob, logprobs[token_id].rank, logprobs[token_id].decoded_token)
assert output.cumulative_logprob < 0
""",
    "prompt log-probabilities": """
output = llm.generate("Tom has", SamplingParams(prompt_logprobs=1, max_tokens=1))[0]
total = sum(lp[t].logprob for t, lp in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:]))
assert output.prompt_logprobs[0] is None and total < 0
""",
    "logit bias by number": """
params = SamplingParams(temperature=0, logit_bias={25: 100.0}, max_tokens=3)
assert set(llm.generate("Tom", params)[0].outputs[0].token_ids) == {25}
""",
    "empty logit bias": """
assert llm.generate("Tom", SamplingParams(logit_bias={}, max_tokens=1))[0].outputs
""",
    "allowed tokens": """
params = SamplingParams(allowed_token_ids=[25, 26], max_tokens=4)
assert set(llm.generate("Tom", params)[0].outputs[0].token_ids) <= {25, 26}
""",
    "bad words": """
params = SamplingParams(temperature=0, bad_words=["apples"], max_tokens=12)
assert "apples" not in llm.generate("Tom has 3", params)[0].outputs[0].text
""",
    "least tokens": """
params = SamplingParams(min_tokens=6, max_tokens=8)
assert len(llm.generate("Tom", params)[0].outputs[0].token_ids) >= 6
""",
    "special tokens shown": """
params = SamplingParams(temperature=0, skip_special_tokens=False, max_tokens=4)
assert llm.generate("Tom", params)[0].outputs
""",
    "no limit": """
output = llm.generate("Tom", SamplingParams(temperature=0, max_tokens=None))[0].outputs[0]
assert output.finish_reason in ("stop", "length")
""",
    "token ids": """
ids = llm.get_tokenizer().encode("Tom has")
output = llm.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=2))[0]
assert output.prompt_token_ids == ids and output.prompt is None
""",
    "several of token ids": """
ids = llm.get_tokenizer()(["Tom", "Anna"])["input_ids"]
prompts = [{"prompt_token_ids": each} for each in ids]
assert len(llm.generate(prompts, SamplingParams(max_tokens=1))) == 2
""",
    "texts in mappings": """
outputs = llm.generate([{"prompt": "Tom"}, {"prompt": "Anna"}], SamplingParams(max_tokens=1))
assert outputs[1].prompt == "Anna"
""",
    "parameters for each": """
params = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)]
assert [len(o.outputs[0].token_ids) for o in llm.generate(["Tom", "Anna"], params)] == [1, 2]
""",
    "chat": """
conversation = [
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! How can I assist you today?"},
    {"role": "user", "content": "Write an essay about the importance of higher education."},
]
outputs = llm.chat(conversation, sampling_params=SamplingParams(max_tokens=4), use_tqdm=False)
assert outputs[0].outputs[0].text is not None
""",
    "several chats": """
conversations = [[{"role": "user", "content": f"What is {i} times 7?"}] for i in range(3)]
assert len(llm.chat(conversations, SamplingParams(max_tokens=2))) == 3
""",
    "parts of a message": """
conversation = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
assert llm.chat(conversation, SamplingParams(max_tokens=2))[0].outputs
""",
    "choices": """
structured = StructuredOutputsParams(choice=["Positive", "Negative"])
params = SamplingParams(max_tokens=20, structured_outputs=structured)
assert llm.generate("Classify: great!", params)[0].outputs[0].text in ("Positive", "Negative")
""",
    "a schema": """
import json
schema = {
    "type": "object",
    "properties": {"is_sold": {"type": "boolean"}},
    "required": ["is_sold"],
    "additionalProperties": False,
}
structured = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
params = SamplingParams(temperature=0, max_tokens=60, structured_outputs=structured)
text = llm.generate("JSON:", params)[0].outputs[0].text
assert isinstance(json.loads(text)["is_sold"], bool)
""",
    "the default parameters": """
sampling_params = llm.get_default_sampling_params()
assert sampling_params.max_tokens == 16 and llm.generate("Tom", sampling_params)
""",
    "arguments of the engine": """
with LLM(model=MODEL, dtype="bfloat16", max_model_len=128, gpu_memory_utilization=0.8,
         tensor_parallel_size=1, enforce_eager=True, trust_remote_code=True,
         max_num_seqs=8, seed=0) as other:
    output = other.generate("Hello", SamplingParams(max_tokens=2))[0]
    assert output.metrics is not None and output.request_id
""",
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(model=str(BUNDLED_MODEL)) as engine:
        yield engine


@pytest.mark.parametrize("name", SNIPPETS)
def test_a_snippet_runs(llm: LLM, name: str) -> None:
    names = {
        "LLM": LLM,
        "MODEL": str(BUNDLED_MODEL),
        "SamplingParams": SamplingParams,
        "StructuredOutputsParams": StructuredOutputsParams,
        "llm": llm,
    }
    exec(SNIPPETS[name], names)
