"""A model's tokenizer and chat templates: read by transformers, used without it."""

from seer_worker.tokenizer.model_tokenizer import ModelTokenizer
from seer_worker.tokenizer.reading import TokenizerReading, has_tokenizer

__all__ = ["ModelTokenizer", "TokenizerReading", "has_tokenizer"]
