"""A rank of ``det-ds bench``::

    python3 -m determined_ds.runtime.benching.bench_rank --run-dir DIR --request JSON

Rank 0 writes what was measured to ``machine.json`` in the run directory.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from determined_ds.protocol.machine_file import NAME, write_machine
from determined_ds.runtime.benching.bench_request import BenchRequest
from determined_ds.runtime.rank_process import RankProcess, end_process


def main(argv: list[str] | None = None) -> int:
    """Measure as one rank. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python3 -m determined_ds.runtime.benching.bench_rank")
    parser.add_argument("--run-dir", type=Path, required=True, help="of det-ds bench")
    parser.add_argument("--request", type=BenchRequest.from_text, required=True, help="what to measure")
    options = parser.parse_args(argv)

    def work() -> None:
        from determined_ds.runtime.benching.measuring import measure

        machine = measure(options.request, say=lambda line: print(f"  {line}", file=sys.stderr, flush=True))
        if machine is not None:
            write_machine(options.run_dir / NAME, machine)

    return RankProcess(options.run_dir).run(work, exit_of=lambda _: None)


if __name__ == "__main__":
    end_process(main())
