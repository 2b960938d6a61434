"""A checkpoint folder's tokenizer and chat template.

Everything is read from the local folder, never from a hub. A beginning-of-text token is added
exactly where the tokenizer adds it, never twice. Exceptions of other libraries become EesdErrors.
"""

import json
import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol, Self, cast

from eesd_dist.errors import CheckpointError, RequestError, TextTooLong, listed
from eesd_dist.text.end_tokens import end_token_ids
from eesd_dist.text.pieces import Pieces, text_of_raw_bytes
from eesd_dist.types import TokenId

logger = logging.getLogger(__name__)

_ORDINARY_TEXT = "Hello, what is 12 times 7?"
_RESERVED_TEMPLATE_OPTIONS = frozenset(
    {
        "chat_template",
        "conversation",
        "documents",
        "max_length",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    }
)


_TEMPLATE_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Python's errors in the code of a chat template."""


class TextCodec(Protocol):
    """Tokenizer as far as other modules need it."""

    @property
    def vocab_size(self) -> int:
        """Number of the model's ids; all ids that the tokenizer returns are smaller."""
        ...

    @property
    def eos_token_ids(self) -> tuple[TokenId, ...]:
        """All of them are below `vocab_size`."""
        ...

    @property
    def special_token_ids(self) -> frozenset[TokenId]: ...
    def encode(self, prompt: str, *, add_special_tokens: bool = True) -> tuple[TokenId, ...]: ...
    def encode_chat(
        self, messages: Sequence[Mapping[str, object]], /, **template_options: object
    ) -> tuple[TokenId, ...]: ...
    @property
    def tool_template(self) -> str | None:
        """The chat template for conversations with tools; None for a model without a template."""
        ...

    def decode(self, tokens: Sequence[TokenId], *, skip_special_tokens: bool = True) -> str: ...
    def token_bytes(self, token: TokenId) -> bytes:
        """Returns the token's bytes; empty for an unused id."""
        ...

    @property
    def raw_byte_ids(self) -> frozenset[TokenId]:
        """The `<0x..>` tokens of a vocabulary with byte fallback."""
        ...


class Tokenizer:
    """The tokenizer of a checkpoint folder, loaded with transformers."""

    def __init__(
        self,
        backend: Any,
        *,
        decoder_rules: Pieces,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        max_tokens: int | None = None,
    ) -> None:
        """`backend` is a transformers tokenizer; `load` makes one and checks that it fits."""
        vocabulary: Mapping[str, int] = backend.get_vocab()
        self._backend = backend
        self._foreign = {id_: text for text, id_ in vocabulary.items() if id_ >= vocab_size}
        """Tokens that the model does not have."""
        self._decoder_rules = decoder_rules
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(TokenId(token) for token in eos_token_ids)
        self._special_token_ids = _special_ids(backend)
        self._raw_byte_ids = frozenset(
            TokenId(id_)
            for entry, id_ in backend.get_vocab().items()
            if decoder_rules.is_raw_byte(entry)
        )
        self._bytes: dict[TokenId, bytes] = {}
        self._max_tokens = max_tokens
        self._added = _added_ids(backend)
        self._max_token_bytes = (
            0
            if max_tokens is None
            else max(len(self._bytes_of(text, id_)) for text, id_ in vocabulary.items())
        )

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        model_vocab_size: int | None = None,
        max_tokens: int | None = None,
    ) -> Self:
        """Loads the folder's tokenizer. `model_vocab_size` None takes the one in config.json, if
        any. With `max_tokens`, texts that cannot be as short as that are refused before they are
        tokenised. Raises CheckpointError."""
        backend = _load_backend(folder)
        config = _read_json(folder / "config.json")
        if model_vocab_size is None:
            model_vocab_size = cast("int | None", config.get("vocab_size"))
        vocab_size = model_vocab_size if model_vocab_size is not None else _num_ids(backend)
        generation = folder / "generation_config.json"
        eos = {
            folder / "tokenizer_config.json": backend.eos_token_id,
            folder / "config.json": config.get("eos_token_id"),
            generation: _read_json(generation).get("eos_token_id"),
        }
        tokenizer = cls(
            backend,
            decoder_rules=Pieces.of_decoder(_decoder_of(backend), file=folder / "tokenizer.json"),
            vocab_size=vocab_size,
            eos_token_ids=end_token_ids(eos, vocab_size=vocab_size),
            max_tokens=max_tokens,
        )
        if tokenizer._foreign:
            tokenizer._report_foreign(folder)
        if backend.chat_template is not None:
            tokenizer._require_rendering(folder)
        return tokenizer

    def _report_foreign(self, folder: Path) -> None:
        """Warns of tokens that the model does not have. Raises CheckpointError if every prompt has
        one."""
        names = [f"{text} ({id_})" for id_, text in sorted(self._foreign.items())]
        try:
            self.encode(_ORDINARY_TEXT)
        except RequestError as error:
            raise CheckpointError(
                file=folder / "tokenizer.json",
                found=f"token ids up to {max(self._foreign)}, also in ordinary text",
                expected=f"ids below the model's vocabulary of {self._vocab_size}",
                advice="this tokenizer belongs to another model",
            ) from error
        logger.warning(
            "prompts with tokens outside the model's vocabulary are refused: folder=%s "
            "vocab_size=%d tokens=%s",
            folder, self._vocab_size, listed(names),
        )  # fmt: skip

    @property
    def backend(self) -> Any:
        """The tokenizer of transformers."""
        return self._backend

    @property
    def vocab_size(self) -> int:
        """The model's vocabulary size, which may be padded beyond the tokenizer's."""
        return self._vocab_size

    @property
    def eos_token_ids(self) -> tuple[TokenId, ...]:
        return self._eos_token_ids

    @property
    def special_token_ids(self) -> frozenset[TokenId]:
        return self._special_token_ids

    def encode(self, prompt: str, *, add_special_tokens: bool = True) -> tuple[TokenId, ...]:
        return self._encode(prompt, add_special_tokens=add_special_tokens, param="prompt")

    def encode_chat(
        self, messages: Sequence[Mapping[str, object]], /, **template_options: object
    ) -> tuple[TokenId, ...]:
        """Encodes messages with the folder's chat template, which adds all special tokens."""
        text = self.render_chat(messages, **template_options)
        return self._encode(text, add_special_tokens=False, param="messages")

    def _encode(self, text: str, *, add_special_tokens: bool, param: str) -> tuple[TokenId, ...]:
        if self._max_tokens is not None:
            self._check_size(text, max_tokens=self._max_tokens, param=param)
        if not _is_unicode(text):
            raise RequestError(
                f"{param}: found half of a surrogate pair, expected valid UTF-8",
                param=param,
            )
        # Lists of a million entries are built under the GIL: the two others are not asked for.
        tokens = tuple(
            self._backend.encode(
                text,
                add_special_tokens=add_special_tokens,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )
        )
        if self._foreign:
            self._check_vocabulary(tokens, param=param)
        return tokens

    def _check_vocabulary(self, tokens: Sequence[int], *, param: str) -> None:
        foreign = next((token for token in tokens if token in self._foreign), None)
        if foreign is not None:
            raise RequestError(
                f"{param}: found {self._foreign[foreign]!r}, which is token {foreign}, expected "
                f"tokens below the model's vocabulary of {self._vocab_size}: leave it out",
                param=param,
            )

    def _check_size(self, text: str, *, max_tokens: int, param: str) -> None:
        """Characters are compared, since counting bytes would take time; each has one or more."""
        limit = max_tokens * self._max_token_bytes
        if len(text) > limit:
            raise TextTooLong(num_bytes=len(text), limit=limit, max_tokens=max_tokens, param=param)

    def render_chat(
        self, messages: Sequence[Mapping[str, object]], /, **template_options: object
    ) -> str:
        import jinja2  # only needed for chat templates

        if self._backend.chat_template is None:
            raise RequestError(
                "this model has no chat template: send a prompt to /v1/completions instead, or "
                "put a chat_template.jinja into the model's folder",
                param="messages",
            )
        if reserved := sorted(_RESERVED_TEMPLATE_OPTIONS & template_options.keys()):
            raise RequestError(
                f"{', '.join(reserved)} cannot be given to the chat template",
                param="chat_template_kwargs",
            )
        options = {"add_generation_prompt": True} | template_options
        try:
            text = self._backend.apply_chat_template(list(messages), tokenize=False, **options)
        except (jinja2.TemplateError, *_TEMPLATE_ERRORS) as error:
            raise RequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        return cast("str", text)

    def _require_rendering(self, folder: Path) -> None:
        """Raises CheckpointError for a chat template that would refuse every conversation."""
        try:
            text = self.render_chat([{"role": "user", "content": "Hello"}])
            problem = "a chat template that renders a user's message to an empty text"
        except RequestError as error:
            text, problem = "", str(error)
        if not text:
            raise CheckpointError(
                file=_template_file(folder),
                found=problem,
                expected="a chat template that renders the user's message 'Hello'",
                advice="mend the template, or remove it: then only completions are served",
            )

    @property
    def tool_template(self) -> str | None:
        if self._backend.chat_template is None:
            return None
        try:  # a folder may have several templates, one of them for tools
            return cast("str", self._backend.get_chat_template(tools=[{}]))
        except ValueError:  # several, none of them for conversations as such
            return None

    def decode(self, tokens: Sequence[TokenId], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of these tokens, which are a full text."""
        skipped = self._special_token_ids if skip_special_tokens else frozenset()
        shown = (token for token in tokens if token not in skipped)
        text = "".join(
            self._text_of(run, are_raw_bytes=are_raw_bytes)
            for are_raw_bytes, run in groupby(shown, self._raw_byte_ids.__contains__)
        )
        return text.removeprefix(" ") if self._decoder_rules.strips_first_space else text

    def _text_of(self, tokens: Iterable[TokenId], *, are_raw_bytes: bool) -> str:
        content = b"".join(map(self.token_bytes, tokens))
        return text_of_raw_bytes(content) if are_raw_bytes else content.decode(errors="replace")

    @property
    def raw_byte_ids(self) -> frozenset[TokenId]:
        return self._raw_byte_ids

    def token_bytes(self, token: TokenId) -> bytes:
        content = self._bytes.get(token)
        if content is None:
            content = self._bytes[token] = self._look_up(token)
        return content

    def _look_up(self, token: TokenId) -> bytes:
        entry = self._backend.convert_ids_to_tokens(int(token))
        return b"" if entry is None else self._bytes_of(entry, token)

    def _bytes_of(self, entry: str, token: int) -> bytes:
        return self._decoder_rules.bytes_of(entry, is_literal=token in self._added)


def leave_out_torch() -> None:
    """Makes transformers work without torch in this process, where only tokenizers are needed: an
    ingress is 390 MiB smaller and starts seconds earlier. Does nothing once either is loaded.

    A `None` in `sys.modules` makes a module look as if it were not installed; transformers checks
    once and keeps the result.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        from transformers.utils.import_utils import is_torch_available

        assert not is_torch_available()
    finally:
        del sys.modules["torch"]


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _load_backend(folder: Path) -> Any:
    if not folder.is_dir():
        raise CheckpointError(file=folder, found="no folder", expected="a checkpoint folder")
    try:
        backend = _tokenizer_class(folder).from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    # The Rust library raises bare Exception for a tokenizer.json that it cannot read.
    except Exception as error:
        raise CheckpointError(
            file=folder,
            found=f"a tokenizer that does not load ({error})",
            expected="tokenizer.json and tokenizer_config.json as transformers writes them",
        ) from error
    # The first call drops a truncation setting of the file. After it the tokenizer does not change
    # and may be used from several threads.
    backend.encode("")
    return backend


def _tokenizer_class(folder: Path) -> Any:
    """Returns the class of transformers that loads this folder's tokenizer.

    For a Llama model with the general class, which Llama 3 names, `AutoTokenizer` returns just
    that, but reads the model's configuration first: this imports torch and takes three seconds.
    """
    declared = _read_json(folder / "tokenizer_config.json")
    is_general = (
        declared.get("tokenizer_class") in ("PreTrainedTokenizerFast", "TokenizersBackend")
        and "auto_map" not in declared
        and _read_json(folder / "config.json").get("model_type") == "llama"
        and (folder / "tokenizer.json").is_file()
    )
    # Imported here: importing transformers takes time, and AutoTokenizer imports torch.
    if is_general:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def _decoder_of(backend: Any) -> object:
    inner = getattr(backend, "backend_tokenizer", None)
    return None if inner is None else json.loads(inner.to_str()).get("decoder")


def _num_ids(backend: Any) -> int:
    highest: int = max(backend.get_vocab().values(), default=-1)
    return highest + 1


def _special_ids(backend: Any) -> frozenset[TokenId]:
    special = (id_ for id_, token in backend.added_tokens_decoder.items() if token.special)
    return frozenset(TokenId(id_) for id_ in (*backend.all_special_ids, *special))


def _added_ids(backend: Any) -> frozenset[int]:
    """Returns the ids that stand for an added text only: one that the vocabulary had before may
    also come from other texts."""
    inner = getattr(backend, "backend_tokenizer", None)
    own = {} if inner is None else inner.get_vocab(with_added_tokens=False)
    entries = backend.added_tokens_decoder.items()
    return frozenset(id_ for id_, token in entries if token.special or token.content not in own)


def _template_file(folder: Path) -> Path:
    """Returns the file that the chat template is read from; of several templates, their folder."""
    names = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
    files = (folder / name for name in names)
    return next((file for file in files if file.exists()), folder / "tokenizer_config.json")


def _read_json(file: Path) -> Mapping[str, object]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise CheckpointError(
            file=file, found=f"no JSON ({error})", expected="a JSON object"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(
            file=file, found=f"a JSON {type(content).__name__}", expected="a JSON object"
        )
    return content
