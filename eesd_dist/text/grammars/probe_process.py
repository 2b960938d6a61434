"""Body of the process that compiles grammars of strangers first: see `probe`.

Run as a file, with llguidance alone, which the last argument says where to find: one line of JSON
in for each grammar, and one out. What cannot be compiled within the memory and the stack that this
process has, ends it.
"""

import json
import resource
import sys
import threading

if sys.argv[-1] not in sys.path:  # an installation of the user's
    sys.path.append(sys.argv[-1])

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

_STACK_BYTES = 2 << 20
"""A quarter of what threads have in which grammars are compiled after that."""
_MEMORY_BYTES = 2 << 30


class _Bytes:
    """A token for each byte, and one that ends texts."""

    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"")

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(_STACK_BYTES)
    limits = LLParserLimits(**json.loads(sys.argv[1]))
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()), n_vocab=257, eos_token=256)
    for line in sys.stdin:
        worker = threading.Thread(target=_compile, args=(tokenizer, json.loads(line), limits))
        worker.start()
        worker.join()
        sys.stdout.write("\n")
        sys.stdout.flush()


def _compile(tokenizer: LLTokenizer, grammar: str, limits: LLParserLimits) -> None:
    LLMatcher(tokenizer, grammar, log_level=0, limits=limits).compute_bitmask()


if __name__ == "__main__":
    main()
