"""What do prompts with images cost the driver, and how many bytes go to the instances?

Each prompt of a file has as many images, JPEGs of noise that all differ; or the prompts share a few. The file
is read as by `seer run`, in a process of its own, which decodes each image once. Then two chunks of each
response go to each instance, and the images that its client would send to it are counted. No engine runs.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness import ROOT, Row, cell, markdown, spread_of

DEPENDS_ON = ("session", "backends/worker", "host")
ROUNDS = 3

FORMS = ("paths", "data URLs", "paths, shared")
SHARED = 8
"""The images that all prompts have, where they share them."""
INSTANCES = 2


def options(parser: argparse.ArgumentParser) -> None:
    """Add the case's own options."""
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--images", type=int, default=8, help="of each prompt (default 8)")
    parser.add_argument("--pixels", type=int, default=448, help="of an image's side (default 448)")


def run(options: argparse.Namespace) -> list[Row]:
    """Read the same prompts in every form, each in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        files = write_prompts(Path(folder), options.prompts, options.images, options.pixels)
        found: dict[str, list[Row]] = {form: [] for form in FORMS}
        for number in range(options.rounds):
            for form, path in files.items():
                command = [sys.executable, "-m", "bench.image_prompts", str(path)]
                done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
                found[form].append(json.loads(done.stdout.splitlines()[-1]))
                print(f"round {number + 1}: {form}", file=sys.stderr, flush=True)
    sizes = {"prompts": options.prompts, "images": options.images, "pixels": options.pixels}
    return [
        {"form": form, **sizes, **{name: spread_of(each[name] for each in rounds) for name in rounds[0]}}
        for form, rounds in found.items()
    ]


def write_prompts(folder: Path, prompts: int, images: int, pixels: int) -> dict[str, Path]:
    """Write images, and a prompts file for each form."""
    from PIL import Image

    draw, count = random.Random(1), prompts * images
    names = [f"{number}.jpg" for number in range(count)]
    for name in names:
        coarse = Image.frombytes("RGB", (56, 56), draw.randbytes(3 * 56 * 56))
        coarse.resize((pixels, pixels)).save(folder / name, quality=90)
    shared = [names[number % SHARED] for number in range(count)]
    lists = {"paths": names, "data URLs": names, "paths, shared": shared}
    files = {}
    for form, each in lists.items():
        path = files[form] = folder / f"{form.replace(' ', '-')}.jsonl"
        with path.open("w") as file:
            for number in range(prompts):
                chosen = each[number * images : (number + 1) * images]
                if form == "data URLs":
                    chosen = [_url((folder / name).read_bytes()) for name in chosen]
                parts = [{"type": "image", "image": name} for name in chosen]
                text = {"type": "text", "text": f"{number} + 1"}
                record = {"messages": [{"role": "user", "content": [*parts, text]}], "n": 1}
                file.write(json.dumps(record) + "\n")
    return files


def _url(data: bytes) -> str:
    return f"data:image/jpeg;base64,{base64.b64encode(data).decode()}"


class Placing:
    """A tokenizer of one token for a text and one for an image, as many as the model of the paper takes."""

    def __init__(self) -> None:
        from seer_worker.tokenizer.images import ImagePlaces

        self.place_images = ImagePlaces(7, 28).place

    def encode(self, text: str) -> list[int]:
        """Return one token."""
        return [5]

    def encode_chat(self, messages: Sequence[Any]) -> list[int]:
        """Return one token for each part."""
        return [7 if part["type"] == "image" else 5 for each in messages for part in each["content"]]


def read(path: Path) -> Row:
    """Read a prompts file and send its images; return seconds of CPU, and bytes."""
    from seer_host.config_files import RolloutTable
    from seer_session.prompts import read_prompts
    from seer_worker.client.images import HeldImages, read_all
    from seer_worker.wire import HoldImage

    from seer_core.ports.engine import ModelInfo

    model = ModelInfo(1000, 32_768, takes_images=True)
    before, begun_s = _held_bytes(), time.process_time()
    groups: Any = read_prompts(path, RolloutTable(n=1, max_tokens=16), model, Placing()).groups  # type: ignore[arg-type]
    read_s, held = time.process_time() - begun_s, _held_bytes() - before
    begun_s, sent = time.process_time(), []
    for _ in range(INSTANCES):
        images = HeldImages()
        for group in groups:
            for again in range(2):
                files = read_all(images.unread(group.attachments))
                messages = images.open(f"{group.id}/0#{again}", group.attachments, files)
                sent += [len(each.data) for each in messages if isinstance(each, HoldImage)]
    return {
        "tokens": sum(len(group.prompt_token_ids) for group in groups),
        "read_s": read_s,
        "held_bytes": held,
        "send_s": time.process_time() - begun_s,
        "sent_images": len(sent) / INSTANCES,
        "sent_bytes": sum(sent) / INSTANCES,
        "most_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }


def _held_bytes() -> int:
    """Return the memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def answer(rows: Sequence[Row]) -> str:
    """Return what an image costs, and what the driver holds."""
    found = {row["form"]: row for row in rows}
    paths, urls, _ = (found[form] for form in FORMS)
    count = paths["prompts"] * paths["images"]
    held, coded = (each["held_bytes"]["median"] / 2**20 for each in (paths, urls))
    return (
        f"An image of {paths['pixels']} x {paths['pixels']} pixels costs the driver"
        f" {paths['read_s']['median'] / count * 1e3:.1f} ms of CPU to read. {count:,} images take"
        f" {held:,.0f} MiB of its memory, or {coded:,.0f} MiB as data URLs."
    )


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown."""

    def mebibytes(figure: dict[str, float]) -> str:
        return cell({name: value / 2**20 for name, value in figure.items()}, ",.0f")

    columns = (
        *("images as", "prompts", "images of each", "tokens", "CPU to read them, s", "memory held, MiB"),
        *("most memory, MiB", "images sent to an instance", "MiB sent to it", "CPU to send them, s"),
    )
    return markdown(
        columns,
        [
            [
                row["form"],
                f"{row['prompts']:,}",
                str(row["images"]),
                cell(row["tokens"], ",.0f"),
                cell(row["read_s"], ".1f"),
                mebibytes(row["held_bytes"]),
                mebibytes(row["most_bytes"]),
                cell(row["sent_images"], ",.0f"),
                mebibytes(row["sent_bytes"]),
                cell(row["send_s"], ".2f"),
            ]
            for row in rows
        ],
    )


if __name__ == "__main__":
    print(json.dumps(read(Path(sys.argv[1]))))
