"""Reads answers by SGLang's parsers, in SGLang's environment: lines of JSON come in and go out."""

import json
import sys
from pathlib import Path

import msgspec
import sgl_kernel  # noqa: F401 -- the stand-in declares what torchvision lacks
from seer_server.choices import joined
from seer_server.parsing import ParserNames
from seer_server.protocol import ChatRequest
from seer_server.sglang_parsers import SGLangParsers
from seer_worker.tokenizer import ModelTokenizer


def plain(reading):
    """Return the parts of a reading as JSON has them."""
    calls = [(each.name, json.loads(each.arguments)) for each in reading.calls]
    return {"content": reading.content, "reasoning": reading.reasoning, "calls": calls}


def main():
    """Read requests from the standard input, with the text of their answers."""
    model = Path(sys.argv[1])
    tokenizer = ModelTokenizer(model)
    parsers = {}
    for line in sys.stdin:
        asked = json.loads(line)
        names = ParserNames(*asked["parsers"])
        if names not in parsers:
            parsers[names] = SGLangParsers(names, model)
        chat = msgspec.convert({"messages": [{"role": "user", "content": "a"}], **asked["chat"]}, ChatRequest)
        reading = parsers[names].begin(chat, None)
        prompt = tokenizer.encode_part(asked.get("prompt", "a"))
        tokens = tokenizer.encode_part(asked["text"])
        whole = reading.reader(prompt).read(asked["text"], tokens)
        reader = reading.reader(prompt)
        pieces = [
            reader.read_piece(tokenizer.decode_all([token]), [token], last=at == len(tokens) - 1)
            for at, token in enumerate(tokens)
        ]
        form = None if reading.form is None else msgspec.to_builtins(reading.form)
        found = {"whole": plain(whole), "pieces": plain(joined(pieces)), "form": form}
        print(json.dumps({**found, "reasoning_end": reading.reasoning_end(prompt)}))


main()
