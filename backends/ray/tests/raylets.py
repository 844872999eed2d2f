"""A Ray cluster of several raylets on this machine, which share its network, processes and files."""

from machines import STORE_BYTES


class Nodes:
    """A head without resources, and nodes of one CPU each."""

    def __init__(self, directory):
        from ray.cluster_utils import Cluster

        health = {"period_ms": 500, "timeout_ms": 2000, "failure_threshold": 3}
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "object_store_memory": STORE_BYTES,
                "include_dashboard": False,
                "_system_config": {f"health_check_{name}": value for name, value in health.items()},
            },
        )
        self.directory = directory
        self.nodes = []

    @property
    def address(self):
        return self.cluster.address

    def add(self, **resources):
        node = self.cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES, resources=resources)
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
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)
