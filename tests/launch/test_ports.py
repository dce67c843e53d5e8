"""Ports of launched engines: free, in a row, kept, and still the engines' to listen on."""

import asyncio
import socket
import sys

import pytest
from held_ports import held_ports

from headway.errors import ConfigError
from headway.launch.ports import LOOPBACK, Ports


def listener(port: int) -> socket.socket:
    """Listen as servers do."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind((LOOPBACK, port))
    made.listen()
    return made


async def test_free_ports_differ_and_engines_can_listen_on_them_again_and_again() -> None:
    ports = await Ports.reserve(20, 0)
    try:
        assert len({ports[index] for index in range(20)}) == 20
        for index in range(20):
            for _ in range(2):  # a successor, too
                with listener(ports[index]), socket.create_connection((LOOPBACK, ports[index]), 5):
                    pass
    finally:
        ports.close()


@pytest.mark.skipif(sys.platform != "linux", reason="ports are held on Linux only")
async def test_nobody_is_given_a_port_that_is_held() -> None:
    ports = await Ports.reserve(1, 0)
    try:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((LOOPBACK, ports[0]))
        with pytest.raises(ConnectionRefusedError):  # and nobody answers there meanwhile
            socket.create_connection((LOOPBACK, ports[0]), 5)
    finally:
        ports.close()
    with socket.socket() as other:
        other.bind((LOOPBACK, ports[0]))


async def test_given_ports_follow_the_first() -> None:
    with held_ports(3) as first:
        ports = await Ports.reserve(3, first)
        assert [ports[index] for index in range(3)] == [first, first + 1, first + 2]
        ports.close()


async def test_a_port_where_somebody_listens_is_named_and_waited_for_as_long_as_there_is_patience() -> None:
    with held_ports(2) as first:
        with listener(first + 1):
            with pytest.raises(
                ConfigError,
                match=rf"engine.port is {first}, so engine-1 has port {first + 1}: port {first + 1} is in use: choose another, or 0",
            ):
                await Ports.reserve(2, first)
            with pytest.raises(ConfigError, match=rf"^engine.port is {first + 1}: port {first + 1} is in use"):
                await Ports.reserve(1, first + 1)
            waiting = asyncio.create_task(Ports.reserve(2, first, patience_seconds=120.0))
            await asyncio.sleep(0)
            assert not waiting.done()
        ports = await waiting
        assert ports[1] == first + 1
        ports.close()


async def test_ports_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine.port is 65535, and the last of 2 engines would have 65536"):
        await Ports.reserve(2, 65535)
