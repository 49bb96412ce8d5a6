"""The number of threads that generation chooses on an idle and on a busy machine: tokens per second of the default and
of fixed numbers of threads.

    python benchmarks/thread_policy.py                                             # 4x128, 6x384, 12x768: 13 minutes
    python benchmarks/thread_policy.py --models SmolLM2-135M-Instruct.Q4_1.gguf    # 5 minutes

Measured beside 0, 1 and 2 neighbours: processes that compute all the time. Each number of neighbours is measured in a
new process, since the policy depends on earlier steps; the first round is not counted. The default and the fixed
numbers take turns. The OpenMP spin count is that of tinylm's command line, unless it is set. `of the best` is the
ratio of the default to the faster of the fixed numbers, per round.
"""

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from measure import Spread, Times, print_machine, table, tokens_per_second
from sampling import DTYPES, add_model_option, prepared_models, running
from sampling_programs import POLICIES, Request

DEFAULT = "default"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_option(parser)
    parser.add_argument("--kinds", nargs="+", choices=DTYPES, default=["f32"], help="number formats (default: f32)")
    parser.add_argument("--neighbours", nargs="+", type=int, default=[0, 1, 2], metavar="N", help="default: 0 1 2")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: 5")
    options = parser.parse_args(arguments)
    print_machine()
    rows = []
    for subject, kind, job in prepared_models(options.models, options.kinds):
        for policy in POLICIES:
            for count in options.neighbours:
                with running(policy, job) as program:
                    if program.missing:
                        print(f"{subject.name}: {program.missing}.", file=sys.stderr, flush=True)
                        break
                    requests = {choice: replace(subject.requests()["one"], choice=choice) for choice in program.choices}
                    with busy_neighbours(count):
                        times = measure(program.seconds, requests, options.rounds)
                rows.append([subject.name, kind, policy, str(count), *cells(times, subject.tokens)])
                print(f"{' '.join(rows[-1])}", file=sys.stderr, flush=True)
    fixed = [name for name in times if name != DEFAULT]
    print(table(["model", "weights", "engine", "neighbours", DEFAULT, *fixed, "of the best"], rows))


def measure(seconds: Callable[[Request], float], requests: dict[str, Request], rounds: int) -> Times:
    """The seconds of each request in turns, without a first round. seconds: runs a request."""
    times: Times = {name: [] for name in requests}
    for number in range(rounds + 1):
        for name, request in requests.items():
            taken = seconds(request)
            if number:
                times[name].append(taken)
    return times


def cells(times: Times, tokens: int) -> list[str]:
    """Tokens per second of each choice, and the ratio of the default to the best fixed one."""
    best = min((name for name in times if name != DEFAULT), key=lambda name: statistics.median(times[name]))
    ratios = [fixed / default for fixed, default in zip(times[best], times[DEFAULT], strict=True)]
    spread = Spread(statistics.median(ratios), min(ratios), max(ratios))
    return [*(tokens_per_second(times, name, tokens) for name in times), str(spread)]


@contextmanager
def busy_neighbours(count: int) -> Iterator[None]:
    """Context manager during which `count` other processes use the CPU."""
    with ExitStack() as stack:
        for _ in range(count):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(process.kill)
        yield


if __name__ == "__main__":
    main()
