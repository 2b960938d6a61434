"""generation_config.json as the authors of checkpoints write it."""

import json
from pathlib import Path

import pytest

from eesd_dist.errors import CheckpointError
from eesd_dist.text.sampling_defaults import SamplingDefaults

LLAMA = {
    "bos_token_id": 128000,
    "do_sample": True,
    "eos_token_id": [128001, 128008, 128009],
    "temperature": 0.6,
    "top_p": 0.9,
    "transformers_version": "4.42.3",
}


def _written(folder: Path, content: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


def test_values_of_sampling_are_read_and_all_others_left(tmp_path: Path) -> None:
    assert SamplingDefaults.of_folder(tmp_path).stated() == {}
    folder = _written(tmp_path, LLAMA)
    assert SamplingDefaults.of_folder(folder).stated() == {"temperature": 0.6, "top_p": 0.9}
    assert SamplingDefaults.of_folder(folder, mode="none").stated() == {}


def test_null_is_no_value(tmp_path: Path) -> None:
    folder = _written(tmp_path, {"top_k": None, "min_p": 0.05, "repetition_penalty": None})
    assert SamplingDefaults.of_folder(folder).stated() == {"min_p": 0.05}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"temperature": -1}, "temperature = -1"),
        ({"top_p": "high"}, "top_p = 'high'"),
        ({"max_new_tokens": 0}, "max_new_tokens = 0"),
        ([], "the file = "),
    ],
)
def test_values_that_no_request_could_have_are_refused(
    tmp_path: Path, content: object, message: str
) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json: found ") as error:
        SamplingDefaults.of_folder(_written(tmp_path, content))
    assert message in str(error.value)
    assert "model.generation_config to none" in str(error.value)
