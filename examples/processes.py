"""Processes on this machine that find each other, and leave none behind. On a cluster its scheduler does that."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple, NoReturn

import jax


class Child(NamedTuple):
    """A process that was started, and what it has written, which is forwarded as it comes."""

    process: subprocess.Popen[str]
    lines: list[str]
    reader: threading.Thread


def start(command: Sequence[str], environment: dict[str, str], number: int) -> Child:
    # On stdout gloo tells of each group of devices that it connects, in between the lines of others.
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    process = subprocess.Popen([*command, "--process-id", str(number)], env=environment, text=True, **pipes)
    lines: list[str] = []

    def forward() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line.rstrip())
            print(f"  [{number}] {lines[-1]}", flush=True)

    reader = threading.Thread(target=forward)
    reader.start()
    return Child(process, lines, reader)


@contextlib.contextmanager
def started(command: Sequence[str], number: int, devices: int) -> Iterator[list[Child]]:
    """Processes of so many virtual devices each; each is told its number, and where the first of them listens."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    children: list[Child] = []
    try:
        for i in range(number):
            children.append(start([*command, "--coordinator", coordinator], environment, i))
        yield children
    finally:
        for child in children:
            child.process.kill()  # SIGTERM would not do: JAX takes it for the notice of a preemption
        for child in children:
            child.reader.join()
            with child.process:  # closes the pipes
                pass


def wait_for(children: Sequence[Child], limit: float = 1500, grace: float = 100) -> list[int]:
    """The exit statuses of the processes. After a failure the others have `grace` seconds to fail, too.

    Raises:
      TimeoutError: if a process has not ended by then.
    """
    end, statuses = time.monotonic() + limit, [child.process.poll() for child in children]
    while None in statuses:
        if any(statuses):
            end = min(end, time.monotonic() + grace)
        if time.monotonic() > end:
            raise TimeoutError(f"the processes did not all end: exit statuses {statuses}")
        time.sleep(0.05)
        statuses = [child.process.poll() for child in children]
    for child in children:
        child.reader.join()
    return [status for status in statuses if status is not None]


def outcome(command: Sequence[str], number: int, devices: int) -> tuple[list[int], list[list[str]]]:
    """The exit status and the lines of each process, when all have ended."""
    with started(command, number, devices) as children:
        return wait_for(children), [child.lines for child in children]


def join(coordinator: str, number: int, process: int) -> None:
    """What a process does that was started: it finds the others. On a CPU they exchange arrays by gloo."""
    exit_with_parent()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # A process that fails alone ends without waiting long for the others, and they hear of it.
    limits = {"initialization_timeout": 300, "heartbeat_timeout_seconds": 30, "shutdown_timeout_seconds": 30}
    jax.distributed.initialize(coordinator, number, process, **limits)


def end(error: Exception) -> NoReturn:
    """What a process does that caught an error which all of them raise: it ends with the last line of the error.

    At exit JAX tells the error of a callback once more, and 0.12 then leaves out `jax.distributed.shutdown`, by which
    the processes wait for each other: the first to end would abort.
    """
    print(str(error).strip().splitlines()[-1], file=sys.stderr, flush=True)  # first: a process that fails alone waits
    jax.distributed.shutdown()
    sys.exit(1)


def exit_with_parent() -> None:
    """Ends this process with the one that started it, however that ends: the pipe between them closes."""

    def wait() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
