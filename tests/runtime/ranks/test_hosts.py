"""At which of its addresses a host is reached by the others of a job."""

import pytest

from sok_like.runtime.ranks import hosts, launchers

MINE = ["mine", "10.0.0.1", "172.17.0.1"]
OTHER = ["other", "10.0.0.2", "172.17.0.1"]
ROUTES = {
    "other": "10.0.0.1",
    "10.0.0.2": "10.0.0.9",
    "10.1.0.1": "10.1.0.5",
    "10.2.0.1": "10.0.0.1",
}
INTERFACES = {"ib0": "10.1.0.5", "lo": "127.0.0.1"}


@pytest.fixture(autouse=True)
def network(monkeypatch):
    """A host with these routes and interfaces; other names lead nowhere."""
    for variable in launchers.INTERFACES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(hosts, "names", lambda: MINE)
    monkeypatch.setattr(hosts, "_towards", lambda word: ROUTES.get(word, ""))
    monkeypatch.setattr(hosts, "_of_interface", lambda word: INTERFACES.get(word, ""))


@pytest.mark.parametrize(
    "variable, value, others, expected",
    [
        (0, "", [MINE, OTHER], "10.0.0.1"),
        (0, "", [MINE, ["unknown", *OTHER[1:]]], "10.0.0.9"),
        (0, "", [["mine", "10.0.0.2"]], "10.0.0.9"),  # another host of the same name
        (0, "", [MINE, ["unknown", "172.17.0.1"]], hosts.LOOPBACK),
        (0, "ib0", [MINE, OTHER], "10.1.0.5"),
        (0, "lo", [MINE, OTHER], "10.0.0.1"),
        (1, "none,ib0", [MINE, OTHER], "10.1.0.5"),
        (1, "10.1.0.0/24", [MINE, OTHER], "10.1.0.5"),
        (1, "10.2.0.0/24", [MINE, OTHER], "10.0.0.1"),
        (1, "10.2/x", [MINE, OTHER], "10.0.0.1"),
    ],
)
def test_the_interface_named_to_the_launcher_else_the_one_towards_another_host(
    monkeypatch, variable, value, others, expected
):
    monkeypatch.setenv(launchers.INTERFACES[variable], value)
    assert hosts.address(others) == expected


def test_routes_and_interfaces_of_this_machine(monkeypatch):
    monkeypatch.undo()
    assert hosts._towards("127.0.0.1") == hosts._of_interface("lo") == "127.0.0.1"
    assert hosts._towards("no such host") == hosts._of_interface("no such") == ""
    assert "127.0.0.1" not in hosts.names()
