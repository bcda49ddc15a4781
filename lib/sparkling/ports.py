"""Ports on 127.0.0.1: which are free, who holds the others, and reserving one before it is bound."""

from __future__ import annotations

import errno
import random
import socket

from sparkling import procs
from sparkling.errors import ServerError, UsageError

HOST = "127.0.0.1"
DEFAULT_PORT = 30000
# Above the default and below 32768, where Linux begins to hand out ports by itself.
PORTS = range(DEFAULT_PORT, 32768)


def lock_port(port: int) -> socket.socket | None:
    """Reserve `port` among all Sparkling processes of this machine; None if it is reserved.

    The reservation is the name of an abstract Unix socket: it ends with the last process that has
    the socket open, leaves no file behind, and is valid in the same network namespace as the port.
    """
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(f"\0sparkling-port-{port}")
    except OSError:
        lock.close()
        return None
    return lock


def can_bind(port: int, host: str = HOST) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the server does it: a port whose last connections still linger is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


def holder(port: int) -> str:
    """Who listens on `port`, as words for a sentence."""
    found = procs.listeners(port)
    if found is None:
        return "a process that this user may not look at"
    if found:
        return " and ".join(f"{one.name} (pid {one.pid})" for one in found)
    return "another server of ours that is just starting"


def _busy(port: int) -> ServerError:
    return ServerError(
        f"Port {port} on {HOST} is taken by {holder(port)}; stop it (`sparkling stop` if it is a "
        "server of ours) or choose another port."
    )


def reserve(port: int | None, exact: bool) -> tuple[int, socket.socket]:
    """A port and its lock. Raises ServerError with one sentence if an exact port is taken."""
    others = [] if exact else random.sample(PORTS, len(PORTS))
    for candidate in ([port] if port else []) + others:
        lock = lock_port(candidate)
        if lock is not None and can_bind(candidate):
            return candidate, lock
        if lock is not None:
            lock.close()
        if exact:
            raise _busy(candidate)
    raise ServerError(f"No port from {PORTS.start} to {PORTS.stop - 1} on {HOST} is free.")


def free_port(preferred: int | None = None) -> int:
    """A port on 127.0.0.1 that is free now.

    Args:
        preferred: this port or none.

    Raises:
        UsageError: `preferred` is no port number.
        ServerError: `preferred` is taken; the sentence names the holder where /proc tells it.
    """
    if preferred is not None and not 1 <= preferred <= 65535:
        raise UsageError(f"{preferred} is no port number (1 to 65535).")
    port, lock = reserve(preferred, exact=preferred is not None)
    lock.close()
    return port
