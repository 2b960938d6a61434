"""Writes the tokenizer and the chat template of a GGUF file as transformers reads them."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eesd_dist.errors import CheckpointError
from eesd_dist.model.gguf.header import Metadata

_CONTROL, _USER_DEFINED = 3, 4
"""Types of tokens: special ones, and texts that are one token wherever they are."""
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pieces of text in which merges are made, for the tokenizers of Llama 3 and Qwen 2."""
_PRE_TOKENIZERS = ("default", "gpt-2", "smollm", "llama-bpe", "qwen2")
_SPACE = "▁"


def write_tokenizer(file: Path, metadata: Metadata, folder: Path) -> int:
    """Writes tokenizer.json, tokenizer_config.json and the chat template; returns the number of
    tokens. Raises CheckpointError for an unsupported or inconsistent tokenizer."""
    from transformers import PreTrainedTokenizerFast

    reader = _Tokenizer(file, metadata)
    specials = {
        "bos_token": reader.named("bos_token_id"),
        "eos_token": reader.named("eos_token_id"),
        "unk_token": reader.named("unknown_token_id"),
        "pad_token": reader.named("padding_token_id"),
    }
    try:
        backend = reader.backend()
    # The Rust library raises bare Exception.
    except Exception as error:
        if isinstance(error, CheckpointError):
            raise
        raise reader.error(f"a vocabulary that does not load ({error})", "tokens and merges") from (
            error
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        **{name: text for name, text in specials.items() if text is not None},
    )
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return len(reader.tokens)


def end_tokens(metadata: Metadata, *, vocab_size: int) -> list[int]:
    """Returns the tokens that end an answer: the end of the text, and that of a turn."""
    ids = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    return list(dict.fromkeys(id_ for id_ in ids if isinstance(id_, int) and id_ < vocab_size))


class _Tokenizer:
    """Reads the tokenizer's entries of the metadata."""

    def __init__(self, file: Path, metadata: Metadata) -> None:
        self._file = file
        self._metadata = metadata
        self._model = metadata.get("tokenizer.ggml.model")
        if self._model not in ("gpt2", "llama"):
            raise self.error(f"tokenizer.ggml.model {self._model!r:.80}", "gpt2 or llama")
        self.tokens: Sequence[str] = self._list("tokens", str)
        if len(set(self.tokens)) != len(self.tokens) or not self.tokens:
            raise self.error("tokens that are equal, or none", "tokens that differ")

    def named(self, key: str) -> str | None:
        """Returns the token with this role."""
        id_ = self._metadata.get(f"tokenizer.ggml.{key}")
        if id_ is None:
            return None
        if not isinstance(id_, int) or not 0 <= id_ < len(self.tokens):
            raise self.error(f"{key} {id_!r:.80}", f"an id below {len(self.tokens)}")
        return self.tokens[id_]

    def backend(self) -> Any:
        from tokenizers import AddedToken

        tokenizer = self._byte_level() if self._model == "gpt2" else self._byte_fallback()
        types = self._list("token_type", int) if self._has("token_type") else []
        for token, type_ in zip(self.tokens, types, strict=False):
            if type_ in (_CONTROL, _USER_DEFINED):
                is_special = type_ == _CONTROL
                entry = AddedToken(token, special=is_special, normalized=False)
                (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)([entry])
        # The family of Llama 2 begins with it unless the file says otherwise.
        if self._metadata.get("tokenizer.ggml.add_bos_token", self._model == "llama"):
            self._begin_with_bos(tokenizer)
        return tokenizer

    def _byte_level(self) -> Any:
        from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

        kind = self._metadata.get("tokenizer.ggml.pre", "default")
        # transformers loads those of Qwen with rules of its own, whatever the folder says.
        is_qwen = str(self._metadata.get("general.architecture")).startswith("qwen")
        supported = ("qwen2",) if is_qwen else _PRE_TOKENIZERS
        if kind not in supported:
            raise self.error(f"tokenizer.ggml.pre {kind!r:.80}", f"one of {', '.join(supported)}")
        pairs = [tuple(merge.split(" ")) for merge in self._list("merges", str)]
        if any(len(pair) != 2 for pair in pairs):
            raise self.error("a merge of other than two tokens", "pairs")
        tokenizer = Tokenizer(
            models.BPE(self._vocabulary(), pairs, ignore_merges=kind == "llama-bpe")
        )
        if kind in ("llama-bpe", "qwen2"):
            words = _WORDS.replace("{DIGITS}", "{1,3}" if kind == "llama-bpe" else "")
            steps: list[Any] = [
                pre_tokenizers.Split(Regex(words), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        else:
            steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
            if kind == "smollm":
                steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        if kind == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _byte_fallback(self) -> Any:
        from tokenizers import Tokenizer, decoders, models, normalizers

        scores = self._list("scores", float)
        if len(scores) != len(self.tokens):
            raise self.error(f"{len(scores)} scores", f"{len(self.tokens)}, one for each token")
        vocabulary = self._vocabulary()
        tokenizer = Tokenizer(
            models.BPE(
                vocabulary,
                _merges(vocabulary, scores),
                unk_token=self.named("unknown_token_id") or self.tokens[0],
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        spaces: list[Any] = [normalizers.Replace(" ", _SPACE)]
        has_prefix = bool(self._metadata.get("tokenizer.ggml.add_space_prefix", True))
        if has_prefix:
            spaces.insert(0, normalizers.Prepend(_SPACE))
        tokenizer.normalizer = normalizers.Sequence(spaces)
        steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if has_prefix:
            steps.append(decoders.Strip(content=" ", left=1, right=0))
        tokenizer.decoder = decoders.Sequence(steps)
        return tokenizer

    def _begin_with_bos(self, tokenizer: Any) -> None:
        from tokenizers import processors

        bos = self.named("bos_token_id")
        if bos is None:
            return
        escaped = re.sub(r"([:$])", r"\1", bos)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[escaped, "$A"],
            pair=[escaped, "$A", "$B:1"],
            special_tokens=[(bos, self._vocabulary()[bos])],
        )

    def _vocabulary(self) -> dict[str, int]:
        return {token: id_ for id_, token in enumerate(self.tokens)}

    def _has(self, key: str) -> bool:
        return f"tokenizer.ggml.{key}" in self._metadata

    def _list(self, key: str, kind: type) -> list[Any]:
        content = self._metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(content, list) or not all(isinstance(entry, kind) for entry in content):
            raise self.error(f"tokenizer.ggml.{key} {content!r:.40}", f"a list of {kind.__name__}")
        return content

    def error(self, content: str, expected: str) -> CheckpointError:
        return CheckpointError(
            file=self._file,
            found=content,
            expected=expected,
            advice="use the checkpoint in safetensors that it was converted from",
        )


def _merges(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Returns all pairs of tokens that make a token, those of the best scores first."""
    merges = []
    for token, id_ in vocabulary.items():
        pairs = [(token[:at], token[at:]) for at in range(1, len(token))]
        pairs = [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
        pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += [(scores[id_], pair) for pair in pairs]
    return [pair for _, pair in sorted(merges, key=lambda merge: merge[0], reverse=True)]
