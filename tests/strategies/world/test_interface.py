"""The network interface that gloo takes."""

import os
import socket

import pytest

from lightning_hybrid.strategies.world import interface
from lightning_hybrid.strategies.world.interface import VARIABLE, interface_to, name_interface


def test_the_loopback_is_taken_on_one_node_alone():
    assert interface_to("127.0.0.1", 1) == "lo"
    assert interface_to("localhost", 2) != "lo"


def routes(monkeypatch, addresses, reached):
    """Lets this host have interfaces with these addresses, and reach others from an address each."""

    class Probe(socket.socket):
        def connect(self, target):
            if target[0] not in reached:
                raise OSError("no route")
            self.own = reached[target[0]]

        def getsockname(self):
            return self.own, 0

    monkeypatch.setattr(interface.socket, "socket", Probe)
    monkeypatch.setattr(interface.socket, "if_nameindex", lambda: list(enumerate(addresses)))
    monkeypatch.setattr(interface, "_address_of", lambda name, _: addresses[name])


@pytest.mark.parametrize(
    ("addresses", "reached", "name"),
    [
        ({"lo": "127.0.0.1", "eth0": "10.0.0.1", "down": ""}, {}, "eth0"),
        ({"lo": "127.0.0.1", "docker0": "172.17.0.1", "eth0": "10.0.0.1"}, {"192.0.2.1": "10.0.0.1"}, "eth0"),
        ({"lo": "127.0.0.1", "eth0": "10.0.0.1", "eth1": "10.1.0.1"}, {}, ""),
    ],
)
def test_a_host_that_knows_its_name_by_the_loopback_is_reached_over_a_network(monkeypatch, addresses, reached, name):
    routes(monkeypatch, addresses, {"node-a": "127.0.0.1", **reached})
    assert interface_to("node-a", 2) == name


@pytest.mark.parametrize("address", ["no.such.host.invalid", "256.1.1.1"])
def test_an_address_that_cannot_be_reached_names_none(address):
    assert interface_to(address, 2) == ""


def test_another_node_is_reached_over_the_interface_with_the_address(monkeypatch):
    addresses = {"lo": "127.0.0.1", "eth0": "192.168.0.2", "ib0": "10.0.0.2"}
    routes(monkeypatch, addresses, {"10.0.0.1": "10.0.0.2"})
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
