"""Start a child process that is connected to this process by a pipe, on POSIX and on Windows.

The child inherits a file descriptor of the pipe on POSIX and a handle on Windows. POSIX has
sessions of processes and signals; Windows has neither.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import IO, Any

if sys.platform == "win32":
    from multiprocessing.connection import PipeConnection


def start(
    module: str,
    arguments: Sequence[str],
    theirs: Any,
    environment: dict[str, str],
    said: IO[bytes] | None,
) -> subprocess.Popen[bytes]:
    """Start ``python -m module NUMBER ARGUMENTS...``, which inherits one end of a pipe.

    Parameters
    ----------
    module : str
        The name of the module to run.
    arguments : sequence of str
        Arguments after the number, from which :func:`connection_of` gets the pipe.
    theirs : Connection
        The end of the pipe for the child process; this function closes it in this process.
    environment : dict of str to str
        All environment variables of the process.
    said : file or None
        The file for stdout and stderr of the process; with ``None`` it uses the terminal.
    """
    number = theirs.fileno()
    options: dict[str, Any] = {}
    if sys.platform == "win32":
        os.set_handle_inheritable(number, True)  # noqa: FBT003 - the only spelling
        options["startupinfo"] = subprocess.STARTUPINFO(lpAttributeList={"handle_list": [number]})
        options["creationflags"] = subprocess.CREATE_NEW_PROCESS_GROUP
    else:
        options["pass_fds"] = [number]
        options["start_new_session"] = True
    process = subprocess.Popen(
        [sys.executable, "-m", module, str(number), *arguments],
        env=environment,
        stdin=None if said is None else subprocess.DEVNULL,
        stdout=said,
        stderr=None if said is None else subprocess.STDOUT,
        **options,
    )
    theirs.close()
    return process


def connection_of(number: int) -> Any:
    """Return the inherited end of the pipe; processes that this one starts do not inherit it."""
    if sys.platform == "win32":
        os.set_handle_inheritable(number, False)  # noqa: FBT003 - the only spelling
        return PipeConnection(number)
    else:  # noqa: RET505 - a type checker looks at one branch of each platform
        os.set_inheritable(number, False)  # noqa: FBT003 - the only spelling
        return Connection(number)


def show_stacks_when_asked() -> None:
    """Make this process print its stacks when :func:`ask_for_stacks` is called; not on Windows."""
    if sys.platform != "win32":
        faulthandler.register(signal.SIGUSR1, file=os.dup(2))


def ask_for_stacks(process: subprocess.Popen[bytes]) -> None:
    """Request that a process prints the stacks of its threads; does nothing on Windows."""
    if sys.platform != "win32":
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGUSR1)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process, and on POSIX also the processes of its session."""
    with suppress(ProcessLookupError, PermissionError):
        if sys.platform == "win32":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)
