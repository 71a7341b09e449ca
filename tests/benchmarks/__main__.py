"""``make bench``: every benchmark, its tables in Markdown, and what they were measured on."""

from __future__ import annotations

import os
import platform
import time

import torch

from tests.benchmarks import checking, checkpoints, elastic, exports, loops

print("\nChecking (medians)\n")
print(checking.table())
print("\nThe training loop (median of the turns, lowest and highest in brackets)\n")
print("\n" + loops.table())
print("\nA checkpoint\n")
print(checkpoints.table())
print("\n" + checkpoints.table(size=1))
print("\nA load under another strategy\n")
print(elastic.table())
print("\nAn export\n")
print(exports.table())
cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
versions = f"Python {platform.python_version()}, torch {torch.__version__}"
print(f"\n{platform.machine()}, {cores} cores, {versions}, {time.strftime('%Y-%m-%d')}")
