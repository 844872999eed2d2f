"""Prompts and a reward; each test puts its own reward in."""

import os
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
USED = os, sys, time


def prompts(iteration, groups, seed):
    return [
        {"group_id": f"{iteration}-{index}", "prompt": f"{seed} {index}", "metadata": {"index": index}}
        for index in range(groups)
    ]


def reward(response):
    return 0.0  # the test's own
