"""Search for some minutes in several processes, until the first failure."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from paged_mla_conformance.run.plugin import load_backend
from paged_mla_conformance.search import machine
from paged_mla_conformance.search.steps import search_cases
from paged_mla_conformance.search.sweep import Sweep
from paged_mla_conformance.suite.selection.adapt_case import adapt_dims
from paged_mla_shared.backend import Backend
from paged_mla_shared.dims import PRESETS

SCHEDULES, CASES = 6, 5  # numbered schedules and cases in one round
DRAWN_SCHEDULES, DRAWN_CASES = 4, 25


@dataclass(frozen=True)
class Search:
    """The settings of every round.

    Parameters
    ----------
    factory, dims : str
        The names of the backend's factory and of the model dims.
    dtypes : tuple of str
    folder : Path
        The folder for replay files.
    """

    factory: str
    dims: str
    dtypes: tuple[str, ...]
    folder: Path


def search_for(search: Search, minutes: float, workers: int, first: int) -> Sweep:
    """Run rounds from number `first` on until a round fails or the time is over.

    Parameters
    ----------
    search : Search
    minutes : float
    workers : int
        The number of processes.
    first : int
        The number of the first round.

    Returns
    -------
    Sweep
        The sum of all rounds.
    """
    whole, number = Sweep(), first
    end = time.monotonic() + 60 * minutes
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        running: set[Future[Sweep]] = set()
        while True:
            while len(running) < workers and time.monotonic() < end and not whole.failures:
                running.add(pool.submit(run_round, search, number))
                number += 1
            if not running:
                return whole
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for one in done:
                whole.add(one.result())


def run_round(search: Search, number: int) -> Sweep:
    """Run numbered schedules and cases, then those that hypothesis draws from seed `number`."""
    backend, sweep = _backend(search.factory), Sweep()
    dims = adapt_dims(PRESETS[search.dims], backend.capabilities)
    for offset in range(CASES):
        case = number * CASES + offset
        sweep.run_case(backend, dims, search.dtypes, case, search.folder)
    for offset in range(SCHEDULES):
        sweep.run(backend, dims, search.dtypes, number * SCHEDULES + offset)
    try:
        search_cases(backend, dims, search.dtypes, search.folder, examples=DRAWN_CASES, seed=number)
        machine.search(
            backend, dims, search.dtypes[0], search.folder, examples=DRAWN_SCHEDULES, seed=number
        )
    except Exception as failure:  # a backend may raise anything
        notes = getattr(failure, "__notes__", ())
        sweep.failures[f"drawn from seed {number}"] = "\n".join([str(failure), *notes])
    return sweep


@cache
def _backend(factory: str) -> Backend:
    return load_backend(factory)
