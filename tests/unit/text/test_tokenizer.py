"""Oracle: transformers' decoding of the same tokens."""

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from eesd_dist.errors import CheckpointError, RequestError, TextTooLong
from eesd_dist.text import Tokenizer
from eesd_dist.text.grammars import GrammarCompiler, one_of
from eesd_dist.types import TokenId
from tests.support.tiny_tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS, write_byte_level


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=30))
def test_a_text_comes_back_unchanged(byte_level: Tokenizer, text: str) -> None:
    assert byte_level.decode(byte_level.encode(text)) == text


@settings(max_examples=60, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_decoding_agrees_with_transformers_even_on_broken_bytes(
    byte_level: Tokenizer,
    transformers_byte_level: PreTrainedTokenizerBase,
    data: st.DataObject,
    skip: bool,
) -> None:
    ids = data.draw(st.lists(st.integers(0, byte_level.vocab_size - 1), max_size=20))
    ours = byte_level.decode([TokenId(i) for i in ids], skip_special_tokens=skip)
    assert ours == transformers_byte_level.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("text", ["the cat", " the  the.", "é 🙂 the", "", "Ωthe"])
def test_byte_fallback_decodes_as_transformers_does(
    byte_fallback: Tokenizer, byte_fallback_folder: Path, text: str
) -> None:
    theirs = AutoTokenizer.from_pretrained(byte_fallback_folder, local_files_only=True)
    ids = byte_fallback.encode(text)
    assert list(ids) == theirs.encode(text)
    assert byte_fallback.decode(ids) == theirs.decode(ids) == text


@pytest.mark.parametrize(
    "declared", ["PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizerFast", None]
)
@pytest.mark.parametrize("model_type", ["llama", "qwen2", None])
def test_a_folder_is_loaded_as_auto_tokenizer_loads_it(
    byte_level_folder: Path, tmp_path: Path, declared: str | None, model_type: str | None
) -> None:
    folder = Path(shutil.copytree(byte_level_folder, tmp_path / "model"))
    file = folder / "tokenizer_config.json"
    config = {k: v for k, v in json.loads(file.read_text()).items() if k != "tokenizer_class"}
    file.write_text(json.dumps(config | ({"tokenizer_class": declared} if declared else {})))
    (folder / "config.json").write_text(
        json.dumps({"model_type": model_type} if model_type else {})
    )
    theirs = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ours = Tokenizer.load(folder).backend
    assert type(ours) is type(theirs)
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.chat_template == theirs.chat_template
    assert ours.encode("the cat") == theirs.encode("the cat")


def test_the_bundled_tokenizer_is_loaded_without_torch() -> None:
    """Importing torch takes longer than all the rest of the start of a command."""
    code = (
        "import sys; from eesd_dist.text import Tokenizer; "
        "from eesd_dist.bundled_model import BUNDLED_MODEL; "
        "Tokenizer.load(BUNDLED_MODEL); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_chat_goes_through_the_template_of_the_folder(byte_level: Tokenizer) -> None:
    tokens = byte_level.encode_chat([{"role": "user", "content": "hi"}])
    text = byte_level.decode(tokens, skip_special_tokens=False)
    assert text == "<|bos|><|user|>hi<|end|><|assistant|>"
    assert tokens[0] == SPECIAL_TOKENS.index("<|bos|>")


def test_template_options_reach_the_template(byte_level: Tokenizer) -> None:
    chat = [{"role": "user", "content": "hi"}]
    assert byte_level.render_chat(chat, add_generation_prompt=False).endswith("<|end|>")
    with pytest.raises(RequestError, match="return_tensors"):
        byte_level.encode_chat(chat, return_tensors="pt")


def test_what_the_template_refuses_is_the_callers_fault(byte_level: Tokenizer) -> None:
    with pytest.raises(RequestError, match="no tools here") as caught:
        byte_level.encode_chat([{"role": "tool", "content": "42"}])
    assert caught.value.param == "messages"


def test_a_model_without_a_template_says_so(byte_fallback: Tokenizer) -> None:
    with pytest.raises(RequestError, match="no chat template"):
        byte_fallback.encode_chat([{"role": "user", "content": "hi"}])


def test_all_end_tokens_of_tokenizer_and_configs_are_known(tmp_path: Path) -> None:
    folder = write_byte_level(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 3]}))
    assert Tokenizer.load(folder).eos_token_ids == (0, 3)


def _with_ends(folder: Path, **entries: object) -> Path:
    write_byte_level(folder)
    for name, value in entries.items():
        file = folder / f"{name}.json"
        stored = json.loads(file.read_text()) if file.exists() else {}
        key = "eos_token" if name == "tokenizer_config" else "eos_token_id"
        file.write_text(json.dumps({**stored, key: value}))
    return folder


def test_end_tokens_outside_the_vocabulary_are_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = _with_ends(tmp_path, generation_config=[3, 128_009, -1])
    assert Tokenizer.load(folder).eos_token_ids == (0, 3)
    assert f"left out: file={folder}/generation_config.json ids=128009, -1" in caplog.text


def test_a_checkpoint_with_all_end_tokens_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = _with_ends(tmp_path, tokenizer_config=None, config=128_001, generation_config=[-1])
    with pytest.raises(CheckpointError) as error:
        Tokenizer.load(folder)
    assert str(error.value).startswith(
        f"{folder}/config.json: found eos_token_id 128001 and no end token in the vocabulary, "
        "expected at least one id below"
    )


@pytest.mark.parametrize("value", ["2", 2.0, True, [0, "</s>"], {"id": 2}])
def test_an_end_token_that_is_no_id_is_refused(tmp_path: Path, value: object) -> None:
    folder = _with_ends(tmp_path, generation_config=value)
    with pytest.raises(CheckpointError, match=r"generation_config.json: found eos_token_id"):
        Tokenizer.load(folder)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}{{ m.content }}", "refuses these messages: Unexpected end of"),
        ("{{ raise_exception('a system message first') }}", "a system message first"),
        ("{{ messages[7]['content'] }}", "no element 7"),
        ("{{ messages[0].content.no_such() }}", "no attribute 'no_such'"),
        ("{{ 1 // 0 }}", "by zero"),
        ("{% if false %}never{% endif %}", "to an empty text"),
    ],
)
def test_a_chat_template_that_would_refuse_every_conversation_is_named_when_it_is_loaded(
    tmp_path: Path, template: str, reason: str
) -> None:
    folder = write_byte_level(tmp_path)
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(CheckpointError, match=reason) as error:
        Tokenizer.load(folder)
    assert str(error.value).startswith(f"{folder}/chat_template.jinja: found ")
    assert "or remove it" in str(error.value)


def test_a_tokenizer_of_another_model_is_refused(byte_level_folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"found token ids up to 319, .*vocabulary of 70"):
        Tokenizer.load(byte_level_folder, model_vocab_size=70)


def _with_added(folder: Path, *texts: str) -> Path:
    """Returns a byte-level tokenizer with these added tokens: ids from 320 on."""
    file = write_byte_level(folder) / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(file))
    backend.add_tokens(list(texts))
    backend.save(str(file))
    return folder


def test_tokens_outside_the_model_refuse_only_the_prompts_that_have_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = _with_added(tmp_path, "<|far|>", "<|farther|>")
    tokenizer = Tokenizer.load(folder, model_vocab_size=321)
    assert "refused: " in caplog.text
    assert caplog.messages[0].endswith(f"folder={folder} vocab_size=321 tokens=<|farther|> (321)")
    assert tokenizer.vocab_size == 321
    assert tokenizer.decode(tokenizer.encode("near <|far|>")) == "near <|far|>"
    with pytest.raises(RequestError, match=r"prompt: found '<\|farther\|>', .*token 321.* 321:"):
        tokenizer.encode("near <|farther|>")
    with pytest.raises(RequestError) as error:
        tokenizer.encode_chat([{"role": "user", "content": "<|farther|>"}])
    assert error.value.param == "messages"


def test_a_grammar_with_a_token_outside_the_model_is_spelled_with_others(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(_with_added(tmp_path, "<|far|>"), model_vocab_size=320)
    matcher = GrammarCompiler(lambda: tokenizer).matcher(one_of(["<|far|> cat"]))
    tokens: list[TokenId] = []
    while tokens[-1:] != list(tokenizer.eos_token_ids):
        allowed = int.from_bytes(matcher.mask_after(), "little")
        tokens.append(TokenId(allowed.bit_length() - 1))
        matcher.read(tokens)
    assert tokenizer.decode(tokens) == "<|far|> cat"


@pytest.mark.parametrize("content", ["ilÖveyou", "Straße", "ĠĠ", "naïve café", "日本"])
def test_an_added_token_decodes_as_it_is_written(tmp_path: Path, content: str) -> None:
    tokenizer = Tokenizer.load(_with_added(tmp_path, content), model_vocab_size=321)
    tokens = tokenizer.encode(f"the {content}, Ö")
    assert TokenId(320) in tokens
    assert tokenizer.token_bytes(TokenId(320)) == content.encode()
    assert tokenizer.decode(tokens) == f"the {content}, Ö"
    short = Tokenizer.load(tmp_path, model_vocab_size=321, max_tokens=1)
    assert short.encode(content) == (320,)


def test_a_special_token_of_the_vocabulary_decodes_as_it_is_written(tmp_path: Path) -> None:
    special = "<|Ö|>"
    tokenizer = Tokenizer.load(write_byte_level(tmp_path, more_special_tokens=[special]))
    tokens = tokenizer.encode(f"the {special} Ö")
    assert TokenId(len(SPECIAL_TOKENS)) in tokens
    assert tokenizer.decode(tokens, skip_special_tokens=False) == f"the {special} Ö"


def test_a_token_of_the_vocabulary_that_was_also_added_stays_a_byte(tmp_path: Path) -> None:
    folder = _with_added(tmp_path, "Ġ", "Ġthe")
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.decode(tokenizer.encode("so  the cat")) == "so  the cat"


def test_a_padded_vocabulary_is_fine_and_its_empty_ids_decode_to_nothing(
    byte_level_folder: Path,
) -> None:
    tokenizer = Tokenizer.load(byte_level_folder, model_vocab_size=1024)
    assert tokenizer.vocab_size == 1024
    assert tokenizer.decode([TokenId(1000)]) == ""


def test_a_folder_that_is_not_there_is_an_error_and_no_download(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected a checkpoint folder"):
        Tokenizer.load(tmp_path / "meta-llama" / "Llama-3.1-8B")


def test_a_broken_file_is_named(tmp_path: Path, byte_level_folder: Path) -> None:
    folder = shutil.copytree(byte_level_folder, tmp_path / "broken")
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE"')
    with pytest.raises(CheckpointError, match="does not load"):
        Tokenizer.load(folder)


def test_a_decoder_of_another_family_is_refused(tmp_path: Path, byte_level_folder: Path) -> None:
    folder = shutil.copytree(byte_level_folder, tmp_path / "other")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="WordPiece"):
        Tokenizer.load(folder)


def test_a_text_is_refused_unread_only_if_it_cannot_fit(byte_level_folder: Path) -> None:
    bounded = Tokenizer.load(byte_level_folder, max_tokens=5)
    longest = max((bounded.token_bytes(TokenId(i)) for i in range(bounded.vocab_size)), key=len)
    fits = longest.decode() * 5
    assert len(bounded.encode(fits)) <= 5
    with pytest.raises(TextTooLong, match=rf"found a text of {len(fits) + 1} bytes") as raised:
        bounded.encode(fits + "x")
    copy = pickle.loads(pickle.dumps(raised.value))
    assert (str(copy), copy.param) == (str(raised.value), "prompt")
    assert f"its longest has {len(longest)} bytes; cut 1 bytes or more" in str(copy)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_fits_is_tokenised(byte_level_folder: Path, data: st.DataObject) -> None:
    free = Tokenizer.load(byte_level_folder)
    text = data.draw(st.text(max_size=60))
    tokens = free.encode(text, add_special_tokens=False)
    bounded = Tokenizer.load(byte_level_folder, max_tokens=max(1, len(tokens)))
    assert bounded.encode(text, add_special_tokens=False) == tokens


def test_half_a_surrogate_pair_is_the_callers_fault(byte_level: Tokenizer) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        byte_level.encode("\ud83d")


def test_the_beginning_mark_is_added_only_where_the_tokenizer_does_it(
    tmp_path: Path, byte_level: Tokenizer
) -> None:
    marking = write_byte_level(tmp_path, chat_template=CHAT_TEMPLATE)
    content = json.loads((marking / "tokenizer.json").read_text())
    bos = SPECIAL_TOKENS.index("<|bos|>")
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|bos|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|bos|>": {"id": "<|bos|>", "ids": [bos], "tokens": ["<|bos|>"]}},
    }
    (marking / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.load(marking)
    assert bos not in byte_level.encode("hi")
    assert tokenizer.encode("hi").count(TokenId(bos)) == 1
    assert tokenizer.encode_chat([{"role": "user", "content": "hi"}]).count(TokenId(bos)) == 1
