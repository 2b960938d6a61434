"""Tokenization, detokenization and stop strings. The engine itself works on token ids only."""

from eesd_dist.text.assembler import TextAssembler, TextDelta, TextFinish
from eesd_dist.text.pieces import Pieces
from eesd_dist.text.stop_strings import Checked, StopStrings
from eesd_dist.text.stream_decoder import StreamDecoder
from eesd_dist.text.tokenizer import TextCodec, Tokenizer

__all__ = [
    "Checked",
    "Pieces",
    "StopStrings",
    "StreamDecoder",
    "TextAssembler",
    "TextCodec",
    "TextDelta",
    "TextFinish",
    "Tokenizer",
]
