"""Choose the next draw, report its outcome, and end the search when there are enough draws."""

from __future__ import annotations

import argparse
import time
from collections import Counter

import torch
from asking import Outcome
from combinations import Combination, combination_of, combinations
from crew import Crew, Job
from tally import Tally

from paged_mla_optimized.config.architectures import INTERPRETER
from paged_mla_optimized.runtime.device import device_facts
from paged_mla_shared.errors import InvalidArgument

RIGHT, WRONG, REFUSED, TOO_FEW = 0, 1, 2, 3
_TELL = 60.0  # seconds from one table to the next
COMMAND = "python optimized/tests_gpu/fuzz"


class Search:
    """Draws numbered configurations of whichever combination has fewest steps so far.

    Parameters
    ----------
    wanted : list of Combination
    options : argparse.Namespace
        Of ``__main__.py``.
    arch : str
    """

    def __init__(self, wanted: list[Combination], options: argparse.Namespace, arch: str) -> None:
        self.tally = Tally(wanted)
        self._options = options
        self._arch = arch
        self._numbers: Counter[Combination] = Counter()
        self._in_hand: Counter[Combination] = Counter()
        self._began = self._told = time.monotonic()

    def run(self) -> int:
        """Run draws until the time is over, and report everything; return the exit status."""
        options = self._options
        try:
            if options.workers:
                crew = Crew(options.workers, self.next_job, self.take)
                for job in crew.run(options.seconds, self.tick):
                    self.say(f"given up: {job.combination}/{job.number}, started too late")
            else:
                while time.monotonic() - self._began < options.seconds:
                    job = self.next_job()
                    self.take(job, job.run())
        except KeyboardInterrupt:
            self.say("interrupted")
        self.say(self.tally.table())
        self.say(self.tally.summary())
        if short := self.tally.short(options.least):
            told = ", ".join(f"{c} {self.tally.steps[c]}" for c in short)
            self.say(f"fewer than {options.least} draws of {len(short)} combinations: {told}")
        if self.tally.failures:
            return WRONG
        return TOO_FEW if short else RIGHT

    def next_job(self) -> Job:
        """Return the next configuration to run."""
        done, hand = self.tally.steps, self._in_hand
        steps = self._options.steps
        chosen = min(
            self.tally.wanted,
            key=lambda c: (done[c] + hand[c] * steps, self._numbers[c]),
        )
        number = self._numbers[chosen]
        self._numbers[chosen] += 1
        hand[chosen] += 1
        return self.job(chosen, number)

    def job(self, combination: Combination, number: int) -> Job:
        """Return a numbered configuration."""
        options = self._options
        return Job(
            combination=combination,
            number=number,
            seed=options.seed,
            steps=options.steps,
            arch=self._arch,
            fewer_keys=options.fewer_keys,
        )

    def take(self, job: Job, outcome: Outcome) -> None:
        """Count a configuration, and report a failure at once."""
        self._in_hand[job.combination] -= 1
        self.tally.add(outcome)
        if outcome.failure:
            self.say(f"FAILED {job.combination}/{job.number}, seed {job.seed}: {outcome.failure}")
            self.say(f"  again: {self.command(job)}")

    def command(self, job: Job) -> str:
        """Return the command that runs a configuration again."""
        options = self._options
        parts = [COMMAND, f"--replay {job.combination}/{job.number}", f"--seed {job.seed}"]
        parts += [f"--steps {job.steps}", f"--device {options.device}"]
        return " ".join(parts + ["--fewer-keys"] * job.fewer_keys)

    def tick(self) -> None:
        """Report the progress of the search once a minute, since it may be killed."""
        now = time.monotonic()
        if now - self._told >= _TELL:
            self._told = now
            short = len(self.tally.short(self._options.least))
            self.say(self.tally.table())
            self.say(f"{now - self._began:.0f} s: {self.tally.summary()}, {short} short")

    @staticmethod
    def say(line: str) -> None:
        """Print, and leave nothing in a buffer."""
        print(line, flush=True)


def run(options: argparse.Namespace) -> int:
    """Search, or run one configuration again; return the exit status."""
    arch = INTERPRETER
    if options.device == "gpu":
        if not torch.cuda.is_available():
            print("no CUDA device; use --device cpu to run Triton's interpreter")
            return REFUSED
        arch = device_facts(torch.device("cuda")).arch
    try:
        if options.replay:
            name, _, number = options.replay.rpartition("/")
            if not number.isdigit():
                raise InvalidArgument("--replay", options.replay, "FAMILY/FORMAT/MODE/NUMBER")
            return _replay(Search([combination_of(arch, name)], options, arch), int(number))
        wanted = [c for c in combinations(arch) if options.only in str(c)]
        if not wanted:
            names = ", ".join(map(str, combinations(arch)))
            raise InvalidArgument("--only", options.only, f"part of one of {names}")
    except InvalidArgument as error:
        print(error)
        return REFUSED
    print(f"{len(wanted)} combinations on {arch}, seed {options.seed}", flush=True)
    return Search(wanted, options, arch).run()


def _replay(search: Search, number: int) -> int:
    job = search.job(search.tally.wanted[0], number)
    search.take(job, job.run())
    search.say(search.tally.summary())
    return WRONG if search.tally.failures else RIGHT
