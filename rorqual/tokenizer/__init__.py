"""Text to ids and back: tokenizers, chat templates, streamed text, stop strings. No tensors."""

from rorqual.tokenizer.detokenizer import Detokenizer
from rorqual.tokenizer.stop_strings import StopStrings
from rorqual.tokenizer.tokenizer import Tokenizer

__all__ = ["Detokenizer", "StopStrings", "Tokenizer"]
