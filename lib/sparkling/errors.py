"""The one kind of exception a user of Sparkling is meant to see."""

from __future__ import annotations


class SparklingError(Exception):
    """A failure with one clear sentence: what is wrong, where, and what to do.

    The command line prints the sentence and exits with `exit_code`; in a notebook the cell shows
    the sentence alone, without a traceback, and still counts as failed.
    """

    exit_code = 1

    def _render_traceback_(self) -> list[str]:
        # IPython's hook for exceptions that draw themselves.
        return [f"{type(self).__name__}: {self}"]


class UsageError(SparklingError):
    """The request itself is wrong: an unknown name, a bad value, a missing file."""

    exit_code = 2


class ServerError(SparklingError):
    """The server did not start, died, hangs, or could not be stopped."""


class RequestError(SparklingError):
    """A request was refused, cut short or answered with something that is not an answer."""


class NotLive(SparklingError):
    """A switch that a stage declares on (or off) is not so in the running server."""
