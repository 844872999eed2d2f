"""Bytes that a generated token takes in the runtime: its id and its log-prob, once they are a completion's.

Each response comes in chunks over the wire, as from a real engine's process, and all completions are kept.
"""

from __future__ import annotations

import argparse
import platform
import random
import shlex
import sys
import tracemalloc
from array import array

from seer_host.wire import Finished, Frames, FromWorker, encode

from seer_core.events import Complete, Dispatch
from seer_core.model import PromptGroup
from seer_core.ports import ChunkOutput
from seer_core.transcripts import Transcripts

try:
    from seer_core.arrays import Logprobs, Tokens
except ImportError:  # the version before arrays, for the row above
    Logprobs = Tokens = list  # type: ignore[assignment, misc]


def main() -> None:
    """Write the responses of one group, and print what they take."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--responses", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16_384, help="of each response")
    parser.add_argument("--chunk-tokens", type=int, default=2048)
    arguments = parser.parse_args()
    dice = random.Random(0)
    group = PromptGroup("a", (1, 2, 3), arguments.responses, arguments.tokens)
    frames: Frames[Finished] = Frames(FromWorker)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    book = Transcripts()
    book.add(group)
    completions = []
    for request_id in book:
        for _ in range(0, arguments.tokens, arguments.chunk_tokens):
            job = book.job(Dispatch(request_id, "x", arguments.chunk_tokens, 0, migrated=False), 0.0)
            numbers = [dice.randrange(150_000) for _ in range(arguments.chunk_tokens)]
            logprobs = array("f", [-dice.random() for _ in numbers]).tolist()
            output = ChunkOutput(job.id, Tokens(numbers), Logprobs(logprobs), False, 0, 3, 3, 0, 0)
            [message] = frames.feed(encode(Finished(output)))
            book.finished("x", message.output, 0.0)
        completions.append(book.complete(Complete(request_id, "length"), 0.0).completion)
    taken = tracemalloc.get_traced_memory()[0] - before
    tokens = sum(len(completion.token_ids) for completion in completions)
    print(f"{taken / tokens:.1f} bytes per token ({tokens:,} tokens, {taken / 2**20:.0f} MiB)")
    print(f"Python {platform.python_version()}; {shlex.join([sys.executable.rpartition('/')[2], *sys.argv])}")


if __name__ == "__main__":
    main()
