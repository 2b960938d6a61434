"""Real tokenizers that are small enough to be built in a test: byte-level BPE, and BPE with byte
fallback."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ("<|end|>", "<|bos|>", "<|user|>", "<|assistant|>", "<|system|>")
TEXT = [
    "the quick brown fox jumps over the lazy dog",
    "the cat sat on the mat, and the dog sat on the log",
    "def f(x): return x + 1  # naïve café",
]


def write_byte_level(
    folder: Path,
    *,
    chat_template: str | None = CHAT_TEMPLATE,
    more_special_tokens: Sequence[str] = (),
) -> Path:
    """Returns a tokenizer like that of Llama 3; every text is preserved."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[*SPECIAL_TOKENS, *more_special_tokens],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return _write(tokenizer, folder, chat_template=chat_template)


def write_byte_fallback(folder: Path) -> Path:
    """Returns a tokenizer like that of Llama 2: a mark for the space, raw bytes for unknown
    characters."""
    entries = ["<unk>", *SPECIAL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    entries += list("abcdefghijklmnopqrstuvwxyz.,")
    vocabulary = {entry: i for i, entry in enumerate(entries)}
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    return _write(tokenizer, folder, chat_template=None)


def _write(tokenizer: Tokenizer, folder: Path, *, chat_template: str | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|end|>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "vocab_size": tokenizer.get_vocab_size()})
    )
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)
    return folder
