"""Two hosts on one machine: network namespaces with addresses, names and folders of their own."""
import contextlib
import itertools
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from launch import Job

numbers = itertools.count()


def ip(*words):
    subprocess.run(["ip", *map(str, words)], check=True, capture_output=True, text=True)


class Host:
    """A network namespace whose one cable ends in a switch, under a host name of its own."""

    def __init__(self, name, address, switch, parent):
        self.name, self.address, self.switch, self.folder = name, address, switch, parent / name
        self.folder.mkdir()
        ip("netns", "add", name)
        ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", name, "netns", switch)
        ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", name, "link", "set", device, "up")
        ip("-n", switch, "link", "set", name, "up")
        ip("-n", switch, "link", "set", name, "master", "bridge")

    def pull_the_plug(self):
        """What is sent from now on is lost, and nobody is told."""
        ip("-n", self.switch, "link", "set", self.name, "nomaster")

    def command(self, *words):
        """A command line that runs on this host, as one typed there would."""
        return ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"',
                self.name, *map(str, words)]

    def start(self, *words, **env):
        return Job(self.command(*words), self.folder, **env)

    def run(self, *words):
        subprocess.run(self.command(*words), check=True)


@contextlib.contextmanager
def two_hosts(folder):
    number = f"{os.getpid()}-{next(numbers)}"
    switch, names = f"switch{number}", [f"a{number}", f"b{number}"]
    addresses = ["10.77.0.1", "10.77.0.2"]
    try:
        try:
            ip("netns", "add", switch)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"needs the right to make network namespaces: {error}")
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for name in names:  # ip netns exec shows this file as /etc/hosts
            place = Path("/etc/netns") / name
            place.mkdir(parents=True)
            (place / "hosts").write_text("127.0.0.1 localhost\n" + "".join(
                f"{address} {other}\n" for address, other in zip(addresses, names)))
        yield [Host(name, address, switch, folder) for name, address in zip(names, addresses)]
    finally:
        for name in names:
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
