"""What a page costs the thread that decides, run from its sources and compiled, in turns.

    make .cache/compiled && python bench/state.py [--compiled DIRECTORY]

Processor time of the store alone: jobs are done by nobody and at once, and no message is read or written. Least of several
rounds of 4,096 pages.

    reserve     frames to write in
    borrow      lend a run that is where it is wanted, and take it back
    migrate     bring a run to another tier
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = 4096
ROUNDS = 6
TURNS = 3


def measure() -> dict[str, float]:
    """Processor microseconds a page, of the `kvtier_daemon` that this process imports."""
    from kvtier_daemon.jobs import Job
    from kvtier_daemon.operations import Migrating, lend_at_once
    from tests.daemon.world import World

    world = World(2 * PAGES, 2 * PAGES, slab=256, persistent=False)
    for tier in world.tiers:
        tier.below = None
    store = world.store
    session = world.session()
    space = world.namespace(session)
    space.orders = bytes(2 * PAGES)  # pages of one size
    posted: list[list[Job]] = []
    store.submit = posted.append
    best: dict[str, float] = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        started = time.process_time()
        work()
        while posted:
            for job in posted.pop(0):
                store.finish(job)
            store.run()
        best[name] = min(best.get(name, 1e9), (time.process_time() - started) / PAGES * 1e6)

    for turn in range(ROUNDS):
        keys = [(turn * PAGES + number).to_bytes(16, "little") for number in range(PAGES)]
        reserved = []
        timed("reserve", lambda: reserved.append(world.reserve(session, space, keys)[0]))  # noqa: B023
        world.commit(session, reserved[0])
        run = session.tenant.run(keys)

        def lend() -> None:
            answer = lend_at_once(world.sessions, session, run, world.tiers[0], PAGES)  # noqa: B023
            assert answer is not None
            world.sessions.release(session, answer.lease)

        timed("borrow", lend)
        answers: list[object] = []
        migrating = Migrating(world.sessions, session, list(run), world.tiers[1], answers.append)

        def move() -> None:
            migrating.advance()  # noqa: B023
            store.run()

        timed("migrate", move)
        assert answers and run[-1].frames[1] is not None
        store.forget(run[0], "asked")
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--compiled", default=str(ROOT / ".cache/compiled"), help="where a compiled kvtier is installed"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(measure()))
        return 0
    places = {"sources": ROOT / "daemon", "compiled": Path(given.compiled)}
    best: dict[str, dict[str, float]] = {name: {} for name in places}
    for _ in range(TURNS):
        for name, place in places.items():
            environment = {**os.environ, "PYTHONPATH": f"{place}:{ROOT}"}
            child = [sys.executable, __file__, "--child"]
            told = json.loads(subprocess.run(child, env=environment, check=True, stdout=subprocess.PIPE).stdout)
            best[name] = {row: min(value, best[name].get(row, value)) for row, value in told.items()}
    print(f"{'us a page':12} {'sources':>8} {'compiled':>9} {'ratio':>6}")
    for row, value in best["sources"].items():
        fast = best["compiled"][row]
        print(f"{row:12} {value:8.2f} {fast:9.2f} {value / fast:6.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
