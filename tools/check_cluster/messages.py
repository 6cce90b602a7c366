"""Messages between the machine that leads and each process: a line of JSON each."""
import contextlib
import json
import socket

HERE = socket.gethostname()


def send(connection, message):
    with contextlib.suppress(OSError):  # who is gone does not answer either
        connection.sendall(json.dumps(message).encode() + b"\n")


def receive(connection, seconds):
    """The next message; None where the other one has ended, or says nothing for so long."""
    connection.settimeout(max(0.1, seconds))
    with contextlib.suppress(OSError, ValueError), connection.makefile() as file:
        return json.loads(file.readline())
