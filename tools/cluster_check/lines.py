"""Lines between processes: what one says, another hears."""
import contextlib
import json
import socket
import sys
import time

HERE = socket.gethostname()


def say(line, what):
    with contextlib.suppress(OSError):  # who is gone does not answer either
        line.sendall(json.dumps(what).encode() + b"\n")


def hear(line, seconds):
    line.settimeout(max(0.1, seconds))
    with contextlib.suppress(OSError, ValueError), line.makefile() as file:  # None where nothing comes
        return json.loads(file.readline())


def meet(args):
    """A line to the machine that leads."""
    end = time.monotonic() + args.wait
    while True:
        try:
            return socket.create_connection((args.host, args.port), 3)
        except OSError as error:
            if time.monotonic() > end:
                sys.exit(f"{HERE}: waited {args.wait} s for the machine of the rendezvous, {args.host}:{args.port}: "
                         f"{error}. Is it started, is this its `hostname`, does a firewall drop what comes from here?")
        time.sleep(0.2)
