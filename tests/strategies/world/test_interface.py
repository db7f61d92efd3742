"""The network interface that gloo takes."""

import os
import socket

import pytest

from lightning_hybrid.strategies.world import interface
from lightning_hybrid.strategies.world.interface import VARIABLE, interface_to, name_interface


def test_the_loopback_is_taken_on_one_node_alone():
    assert interface_to("127.0.0.1", 1) == "lo"
    assert interface_to("localhost", 2) == ""


@pytest.mark.parametrize("address", ["no.such.host.invalid", "256.1.1.1"])
def test_an_address_that_cannot_be_reached_names_none(address):
    assert interface_to(address, 2) == ""


def test_another_node_is_reached_over_the_interface_with_the_address(monkeypatch):
    class Probe(socket.socket):
        def connect(self, target):
            assert target == ("10.0.0.1", 9)

        def getsockname(self):
            return "10.0.0.2", 0

    addresses = {"lo": "127.0.0.1", "eth0": "192.168.0.2", "ib0": "10.0.0.2"}
    monkeypatch.setattr(interface.socket, "socket", Probe)
    monkeypatch.setattr(interface.socket, "if_nameindex", lambda: list(enumerate(addresses)))
    monkeypatch.setattr(interface, "_address_of", lambda name, _: addresses[name])
    assert interface_to("10.0.0.1", 2) == "ib0"


def test_the_variable_of_the_user_stays(monkeypatch):
    monkeypatch.setenv(VARIABLE, "ib7")
    name_interface("127.0.0.1", 1)
    assert os.environ[VARIABLE] == "ib7"
    monkeypatch.delenv(VARIABLE)
    name_interface("no.such.host.invalid", 2)
    assert VARIABLE not in os.environ
    name_interface("127.0.0.1", 1)
    assert os.environ[VARIABLE] == "lo"
    del os.environ[VARIABLE]
