"""Who listens on a port of this machine, as Linux shows it to every user."""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from seer_client.protocol import ClientError

__all__ = ["ForeignServerError", "require_one", "require_own"]

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
"""Sockets of this machine, those that listen first; ``proc_pid_net(5)`` describes the columns."""

LISTENING = "0A"

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Listener = tuple[Address, int]
"""The address that it listens at, and its user."""


class ForeignServerError(ClientError):
    """Another user's program listens where a server of this user was expected; nothing was sent.

    Remedy: start ``seer serve`` at another port, or give the client the token yourself.
    """


def require_one(port: int) -> None:
    """Make sure that a program of this user listens on the port, if any does.

    Raises:
        ForeignServerError: others alone do, or this machine does not show it.
    """
    users = {user for _, user in _listeners(port)}
    if users and os.getuid() not in users:
        raise _foreign(port, users)


def require_own(address: str, port: int) -> None:
    """Make sure that a connection to this address has reached a program of this user.

    Raises:
        ForeignServerError: it has not, or this machine does not show it.
    """
    users = _users_at(_plain(ipaddress.ip_address(address)), list(_listeners(port)))
    if users != {os.getuid()}:
        raise _foreign(port, users)


def _foreign(port: int, users: set[int]) -> ForeignServerError:
    others = users - {os.getuid()}
    whom = f"user {min(others)}" if others else "a program that cannot be seen from here"
    return ForeignServerError(
        f"port {port} of this machine is held by {whom}, and not by a server of yours, so the token was not"
        " sent; start seer serve at another port, or give the client the token yourself"
    )


def _users_at(address: Address, listeners: list[Listener]) -> set[int]:
    """Return the users of those that connections to an address reach: the most exact address goes first."""
    anywhere = [ipaddress.ip_address("0.0.0.0")] if address.version == 4 else []
    for each in (address, *anywhere, ipaddress.ip_address("::")):
        if found := {user for where, user in listeners if where == each}:
            return found
    return set()


def _listeners(port: int) -> Iterator[Listener]:
    for table in TABLES:
        try:
            with table.open() as lines:
                next(lines)
                for line in lines:
                    _, local, _, state, _, _, _, user, *_ = line.split()
                    if state != LISTENING:
                        break
                    where, _, number = local.partition(":")
                    if int(number, 16) == port:
                        yield _address(where), int(user)
        except (OSError, StopIteration) as error:
            if table is TABLES[0]:
                raise ForeignServerError(
                    f"{table} does not show who listens on port {port}; give the client the token yourself"
                ) from error


def _address(text: str) -> Address:
    """Return an address that is written as words of 32 bits in the machine's byte order."""
    raw = bytes.fromhex(text)
    if sys.byteorder == "little":
        raw = b"".join(raw[start : start + 4][::-1] for start in range(0, len(raw), 4))
    return _plain(ipaddress.ip_address(raw))


def _plain(address: Address) -> Address:
    """Return an address, one of IPv4 as such."""
    return getattr(address, "ipv4_mapped", None) or address
