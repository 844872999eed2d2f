"""An example of an engine for Seer: Hugging Face transformers."""
