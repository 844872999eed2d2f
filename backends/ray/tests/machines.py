"""Machines for tests, made of Linux namespaces, with a raylet each.

Each has a network, processes, host name, /proc, /tmp and /dev/shm of its own, so nothing works by accident
that works on one machine alone.  The cluster's head runs outside of them, and so does the test, which is the
driver.  They need root and iproute2; ``allowed`` looks for both.
"""

import functools
import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
from seer_host.ports import reserved_port

from tests.support.eventually import eventually

START_S = 120
"""How long a node may take to start, on a machine that runs many tests; 10 s, three times, by default."""

if "ray" not in sys.modules:  # Ray reads them once, when it is imported
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ.update(
        RAY_AUTH_MODE="token",
        RAY_USAGE_STATS_ENABLED="0",
        RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
        RAY_ENABLE_UV_RUN_RUNTIME_ENV="0",
        RAY_enable_metrics_collection="0",
        RAY_raylet_start_wait_time_s=str(START_S),
    )

RAY = str(Path(sys.executable).with_name("ray"))
STORE_BYTES = 80 << 20
HEALTH = {
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 3,
}
JOIN_S = 150.0
"""The limit for a node's joining; a machine that runs many tests is slow."""
POLL_S = 0.1
STARTS = 3
"""How often a head is started before its tests fail."""
RECONNECT, RECONNECT_S = "RAY_gcs_rpc_server_reconnect_timeout_s", 3600
"""How long a raylet goes on without the head, as the guide on clusters advises; a minute otherwise."""
RAYLET, SUPERVISOR, WORKER = "raylet/raylet", "ray::Supervisor", "seer_worker.process"
"""What the command lines of a node's processes have in them."""
UNSHARE = ("unshare", "--pid", "--fork", "--kill-child", "--uts", "--ipc", "--mount", "--mount-proc")
BOOT = """
mount --bind {directory}/{name}.hosts /etc/hosts && hostname {name} || exit 1
mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs /tmp || exit 1
mkdir -p {directory} && mount -t tmpfs tmpfs {directory} || exit 1
{command} || exit 1
cat > /dev/null
exit 0
"""
"""The first process of a machine.  It reaps the others, and ends when its standard input does."""


@functools.cache
def allowed():
    """Return whether this process may make namespaces and networks."""
    if os.geteuid() or not all(map(shutil.which, ("ip", "unshare", "mount", "hostname"))):
        return False
    name = f"seer{secrets.token_hex(3)}"
    tries = [
        ["ip", "link", "add", name, "type", "bridge"],
        ["ip", "netns", "add", name],
        ["ip", "netns", "exec", name, *UNSHARE, "mount", "-t", "tmpfs", "tmpfs", "/tmp"],
    ]
    try:
        return all(subprocess.run(each, capture_output=True).returncode == 0 for each in tries)
    finally:
        subprocess.run(["ip", "link", "del", name], capture_output=True)
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def ip(*arguments):
    subprocess.run(["ip", *map(str, arguments)], check=True, capture_output=True)


def having(word, processes):
    """Return the processes whose command line has this word."""
    found = []
    for process in processes:
        with suppress(psutil.Error):
            if any(word in each for each in process.cmdline()):
                found.append(process)
    return found


def processes_of(directory):
    """Return what runs in a cluster outside of machines; its directory is in all their command lines."""
    return having(f"{directory}/", psutil.process_iter())


def end(processes):
    """Kill processes, and wait until they have ended."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, JOIN_S)


def start_head(command, directory, **environment):
    """Start a cluster's head by Ray's command, and try again where that fails: the machine may be busy."""
    for _ in range(STARTS):
        done = subprocess.run(
            command,
            env=os.environ | {"RAY_TMPDIR": directory} | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=JOIN_S,
        )
        if not done.returncode:
            return
        end(processes_of(directory))
    raise RuntimeError(f"no head: {done.stdout}{done.stderr}")


class Machine:
    """A node of its own network and processes; its name is its host name."""

    def __init__(self, number, network, bridge, directory, command):
        self.name = f"{bridge}m{number}"
        self.ip = f"{network}.{10 + number}"
        self.node_id = ""
        self._link = f"{bridge}v{number}"
        hosts = directory / f"{self.name}.hosts"
        hosts.write_text(f"127.0.0.1 localhost\n{self.ip} {self.name}\n")
        ip("netns", "add", self.name)
        ip("link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        ip("link", "set", self._link, "master", bridge, "up")
        for each in (
            ("addr", "add", f"{self.ip}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
            ("route", "add", "default", "via", f"{network}.1"),
        ):
            ip("-n", self.name, *each)
        command = shlex.join([*command, f"--node-ip-address={self.ip}"])
        boot = BOOT.format(directory=directory, name=self.name, command=command)
        self.log = directory / f"{self.name}.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *UNSHARE, "sh", "-c", boot],
                env={**os.environ, "RAY_TMPDIR": str(directory), RECONNECT: str(RECONNECT_S)},
                stdin=subprocess.PIPE,  # open for as long as this process lives
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def up(self):
        """Whether its processes have not been killed."""
        return self._process.poll() is None

    def processes(self, word=""):
        """Return its processes, of which the command line has this word, as this machine sees them."""
        first = self._first()
        return [] if first is None else having(word, [first, *first.children(recursive=True)])

    def cut(self):
        """Take it off the network without a word: no packet leaves, none arrives, no connection closes."""
        ip("link", "set", self._link, "down")

    def heal(self):
        """Put it back on the network."""
        ip("link", "set", self._link, "up")

    def kill(self):
        """Kill all its processes at once, and wait until none is left."""
        first = self._first()
        if first is not None:
            with suppress(psutil.NoSuchProcess):
                first.kill()
        elif self.up:
            self._process.kill()
        self._process.wait(JOIN_S)

    def close(self):
        self.kill()
        self._process.stdin.close()
        for each in (("netns", "del", self.name), ("link", "del", self._link)):
            with suppress(subprocess.CalledProcessError):  # the link goes with its namespace
                ip(*each)

    def _first(self):
        """Return the machine's first process, whose end is that of all others."""
        with suppress(psutil.NoSuchProcess):
            return next(iter(psutil.Process(self._process.pid).children()), None)
        return None


class Machines:
    """A head without resources, and machines of one CPU each; RAY_TMPDIR of a driver is ``directory``."""

    def __init__(self):
        self.tag = f"s{secrets.token_hex(2)}"
        self.machines = []
        self._count = 0
        self.directory = tempfile.mkdtemp(prefix="ray-")  # short: the paths of sockets are bounded
        self._network = self._lay_network()
        self.host = f"{self._network}.1"
        self._reserved = ExitStack()
        port, client_port = (self._reserved.enter_context(reserved_port()) for _ in range(2))
        self.address = f"{self.host}:{port}"
        try:
            self._start_head(port, client_port)
        except BaseException:
            self.close()
            raise

    def add(self, *, wait=True, **resources):
        """Add a machine, and wait until it is a node."""
        command = [RAY, "start", f"--address={self.address}", "--num-cpus=1", "--num-gpus=0"]
        command += [f"--object-store-memory={STORE_BYTES}", f"--resources={json.dumps(resources)}"]
        command += ["--disable-usage-stats", "--include-log-monitor=false"]
        machine = Machine(self._count, self._network, self.tag, Path(self.directory), command)
        self._count += 1
        self.machines.append(machine)
        if wait:
            self.wait_for(machine)
        return machine

    def wait_for(self, machine):
        """Wait until a machine is a node; it has its ``node_id`` then."""

        def joined():
            found = self._alive_nodes().get(machine.ip)
            if found is None and not machine.up:
                raise RuntimeError(f"{machine.name} has not joined: {machine.log.read_text()[-2000:]}")
            return found

        machine.node_id = eventually(joined, f"{machine.name} is a node", logs=[machine.log])

    def nodes(self):
        """Return the machines that are nodes, as the head has them."""
        alive = self._alive_nodes()
        return [each for each in self.machines if each.ip in alive]

    def node(self, key):
        """Return the machine with this node id, or of this name."""
        return next(each for each in self.machines if key in (each.node_id, each.name))

    def kill_raylet(self, node_id):
        """Kill a machine's raylet, which its first process reaps."""
        [raylet] = self.node(node_id).processes(RAYLET)
        raylet.kill()
        return raylet.pid

    def kill_head(self):
        """Kill the cluster's head, GCS, and leave the raylet that the driver is connected to."""
        [head] = having("gcs_server", processes_of(self.directory))
        head.kill()

    def places(self):
        """Return how many placement groups are taken or asked for."""
        from ray._private.state import GlobalState
        from ray._raylet import GcsClientOptions

        state = GlobalState()
        state._initialize_global_state(
            GcsClientOptions.create(
                self.address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False
            )
        )
        table = state.placement_group_table()
        return sum(each["state"] != "REMOVED" for each in table.values())

    def remove(self, machine):
        self.machines.remove(machine)
        machine.close()

    def close(self):
        """End all; idempotent."""
        while self.machines:
            self.machines.pop().close()
        end(processes_of(self.directory))
        self._reserved.close()
        with suppress(subprocess.CalledProcessError):
            ip("link", "del", self.tag)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _lay_network(self):
        """Make a bridge, whose address is this machine's, and return the first three numbers of its network.

        Other tests have networks of their own beside it.
        """
        ip("link", "add", self.tag, "type", "bridge")
        network = f"10.{64 + secrets.randbelow(64)}.{secrets.randbelow(256)}"
        ip("addr", "add", f"{network}.1/24", "dev", self.tag)
        ip("link", "set", self.tag, "up")
        return network

    def _start_head(self, port, client_port):
        command = [RAY, "start", "--head", f"--node-ip-address={self.host}", f"--port={port}"]
        command += [f"--ray-client-server-port={client_port}", "--num-cpus=0", "--include-dashboard=false"]
        command += [f"--object-store-memory={STORE_BYTES}", f"--system-config={json.dumps(HEALTH)}"]
        command += ["--disable-usage-stats", "--include-log-monitor=false"]
        start_head(command, self.directory)

    def _alive_nodes(self):
        """Return the ids of the nodes that are alive by address; this process need not be in the cluster."""
        from ray._raylet import GcsClient
        from ray.core.generated.gcs_pb2 import GcsNodeInfo

        with suppress(RuntimeError):  # not now
            nodes = GcsClient(address=self.address).get_all_node_info(timeout=JOIN_S)
            alive = [each for each in nodes.values() if each.state == GcsNodeInfo.ALIVE]
            return {each.node_manager_address: each.node_id.hex() for each in alive}
        return {}
