"""A Ray cluster of several raylets on this machine, which share its network, processes and files."""

from machines import HEALTH, STARTS, STORE_BYTES, end, processes_of

from tests.support.eventually import eventually

ALIVE = 0
"""A node's state in Ray's table."""


def _alive(gcs):
    return {id.hex() for id, node in gcs.get_all_node_info().items() if node.state == ALIVE}


class Nodes:
    """A head without resources, and nodes of one CPU each."""

    def __init__(self, directory):
        from ray.cluster_utils import Cluster

        head = {
            "num_cpus": 0,
            "object_store_memory": STORE_BYTES,
            "include_dashboard": False,
            "_system_config": HEALTH,
        }
        self.directory = directory
        self.cluster = self._started(lambda: Cluster(initialize_head=True, head_node_args=head))
        self.nodes = []

    @property
    def address(self):
        return self.cluster.address

    def add(self, **resources):
        has = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "resources": resources}
        node = self._started(lambda: self.cluster.add_node(**has))
        self.nodes.append(node)
        return node

    def node(self, node_id):
        return next(node for node in self.nodes if node.node_id == node_id)

    def kill_raylet(self, node_id):
        """Kill a node's raylet, and reap it: a zombie's workers would go on."""
        from ray._private import ray_constants

        node = self.node(node_id)
        raylet = node.all_processes[ray_constants.PROCESS_TYPE_RAYLET][0].process
        raylet.kill()
        raylet.wait()
        return raylet.pid

    def remove(self, node):
        """End a node, and wait until the cluster counts it no more."""
        from ray._raylet import GcsClient

        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)
        gcs = GcsClient(address=self.address)
        eventually(lambda: node.node_id not in _alive(gcs))

    def _started(self, start):
        """Return what ``start`` does, and try again where it fails: the machine may be busy."""
        for left in reversed(range(STARTS)):
            before = set(processes_of(self.directory))
            try:
                return start()
            except Exception:
                if not left:
                    raise
                end(set(processes_of(self.directory)) - before)
