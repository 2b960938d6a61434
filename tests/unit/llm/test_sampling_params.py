"""Parameters are checked when they are made, in words that say what was found."""

import math

import pytest

from eesd_dist import SamplingParams, StructuredOutputsParams
from eesd_dist.errors import RequestError


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"temperature": -1.0}, r"^temperature: found -1: .* greater than or equal to 0"),
        ({"temperature": math.nan}, r"^temperature: found nan"),
        ({"temperature": "0.5"}, r"^temperature: found '0.5': .* valid number"),
        ({"top_p": 1.5}, r"^top_p: found 1.5"),
        ({"top_k": -2}, r"^top_k: found -2"),
        ({"repetition_penalty": 0.0}, r"^repetition_penalty: found 0"),
        ({"presence_penalty": math.inf}, r"^presence_penalty: found inf"),
        ({"logit_bias": {3: math.nan}}, r"^logit_bias: found nan"),
        ({"max_tokens": 0}, r"^max_tokens: found 0"),
        ({"n": 0}, r"^n: found 0"),
        ({"stop": ""}, r"^stop: found ''"),
        ({"temprature": 0.5}, r"^temprature: .*did you mean temperature\?$"),
        ({"beam_width": 4}, r"^beam_width: found a parameter that is not known here; known: "),
        ({"detokenize": False}, r"^detokenize: found a parameter"),
    ],
)
def test_a_value_out_of_range_is_refused(values: dict[str, object], complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint) as raised:
        SamplingParams(**values)  # type: ignore[arg-type]
    assert raised.value.param == next(iter(values))


def test_values_are_taken_as_python_writes_them() -> None:
    params = SamplingParams(
        temperature=0,
        top_k=-1,
        stop=("a", "b"),
        stop_token_ids={3},  # type: ignore[arg-type]
        logit_bias={5: 1, "6": -1.5},  # type: ignore[dict-item]
        detokenize=True,  # type: ignore[call-arg]
        structured_outputs=StructuredOutputsParams(json={"type": "object"}),
    )
    assert params.stops == ("a", "b")
    assert params.stop_token_ids == [3]
    assert params.logit_bias == {"5": 1.0, "6": -1.5}
    assert SamplingParams(max_tokens=None).max_tokens is None
    assert SamplingParams(top_p=None).top_p == 1.0  # type: ignore[arg-type]
