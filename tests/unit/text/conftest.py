"""One tokenizer of each kind for all tests of this folder: importing transformers takes seconds."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from eesd_dist.text import Tokenizer
from tests.support.tiny_tokenizer import write_byte_fallback, write_byte_level


@pytest.fixture(scope="session")
def byte_level_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_level(tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="session")
def byte_fallback_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_fallback(tmp_path_factory.mktemp("byte_fallback"))


@pytest.fixture(scope="session")
def byte_level(byte_level_folder: Path) -> Tokenizer:
    return Tokenizer.load(byte_level_folder)


@pytest.fixture(scope="session")
def byte_fallback(byte_fallback_folder: Path) -> Tokenizer:
    return Tokenizer.load(byte_fallback_folder)


@pytest.fixture(scope="session")
def transformers_byte_level(byte_level_folder: Path) -> PreTrainedTokenizerBase:
    """The oracle."""
    return AutoTokenizer.from_pretrained(byte_level_folder, local_files_only=True)
