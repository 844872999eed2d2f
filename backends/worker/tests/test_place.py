"""Where a worker runs, as it measures it."""

import socket
import subprocess
import sys

from seer_worker.process.place import node_name, own_address


def test_processes_of_one_node_give_it_one_name_which_begins_with_the_host_s():
    script = "from seer_worker.process.place import node_name; print(node_name())"
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == node_name()
    assert node_name().startswith(f"{socket.gethostname()}-")


def test_the_address_is_that_of_the_own_end_of_the_wire():
    with socket.create_server(("127.0.0.9", 0)) as server:
        end = socket.create_connection(server.getsockname()[:2], source_address=("127.0.0.8", 0))
    with end:
        assert own_address(end) == "127.0.0.8"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert own_address(ours) == "127.0.0.1"
