"""Answers of a given form: JSON schemas, regular expressions and grammars as masks over the vocabulary. No torch."""

from rorqual.structured.compiler import GrammarCompiler
from rorqual.structured.matcher import Grammar, Matcher, fill_masks

__all__ = ["Grammar", "GrammarCompiler", "Matcher", "fill_masks"]
