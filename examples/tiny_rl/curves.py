"""Draw the rewards of several runs into one picture.

python curves.py out/seed-0 out/seed-1 --out curves.png
"""

import argparse
import json
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def draw(runs: list[Path], out: Path) -> None:
    """Draw reward and held-out reward by iteration, a colour for each run."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for number, run in enumerate(runs):
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
        colour = f"C{number}"
        axes.plot([line["reward_mean"] for line in lines], color=colour, label=run.name)
        evaluated = [each for line in lines for each in line["evaluations"]]
        versions = [each["weight_version"] for each in evaluated]
        axes.plot(versions, [each["reward_mean"] for each in evaluated], "o", color=colour)
    axes.set(xlabel="iteration; dots: held-out prompts", ylabel="mean reward")
    axes.legend()
    figure.savefig(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="what `seer train --out` has written")
    parser.add_argument("--out", type=Path, required=True, help="the picture")
    arguments = parser.parse_args()
    draw(arguments.runs, arguments.out)
