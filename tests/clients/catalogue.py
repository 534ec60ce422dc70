"""The clients that are held to the gateway."""

from tests.clients.verdict import Client

CLIENTS = {
    client.name: client
    for client in (
        Client(name="trl", page="TRL", trains=True),
        Client(name="verifiers", page="verifiers"),
        Client(name="tinker", page="Tinker"),
        Client(name="skyrl", page="SkyRL"),
        Client(name="areal", page="AReaL"),
        Client(name="verl", page="verl"),
        Client(name="openpipe-art", page="ART"),
        Client(name="agentlightning", page="Agent Lightning"),
        # Two calls of CUDA, its attention and the device's name, have stand-ins in the driver.
        Client(
            name="trl-async", package="trl", page="TRL, asynchronous", trains=True, timeout_s=420.0
        ),
    )
}
