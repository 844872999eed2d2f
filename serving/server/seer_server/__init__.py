"""Seer behind OpenAI's completions API."""

from seer_server.app import make_app

__all__ = ["make_app"]
