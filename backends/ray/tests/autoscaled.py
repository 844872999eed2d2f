"""A cluster that begins without a node for instances; Ray's own autoscaler adds raylets on this machine."""

import json
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

from machines import RAY, STORE_BYTES, end, processes_of, start_head
from seer_host.ports import reserved_port

HOST = "127.0.0.1"
EMPTY_LISTS = ("cluster_synced_files", "initialization_commands", "rsync_exclude", "rsync_filter")
EMPTY_LISTS += tuple(f"{whose}setup_commands" for whose in ("", "head_", "worker_"))
EMPTY_LISTS += tuple(f"{whose}_start_ray_commands" for whose in ("head", "worker"))


class Autoscaled:
    """A head without resources, and up to two nodes of one CPU that Ray adds when they are wanted."""

    def __init__(self):
        self.directory = tempfile.mkdtemp(prefix="ray-")  # short: the paths of sockets are bounded
        self._reserved = ExitStack()
        port = self._reserved.enter_context(reserved_port())
        self.address = f"{HOST}:{port}"
        config = Path(self.directory, "autoscaler.json")
        config.write_text(json.dumps(self._config()))
        command = [RAY, "start", "--head", f"--node-ip-address={HOST}", f"--port={port}", "--num-cpus=0"]
        command += [f"--object-store-memory={STORE_BYTES}", f"--autoscaling-config={config}"]
        command += ["--include-dashboard=false", "--disable-usage-stats", "--include-log-monitor=false"]
        try:
            start_head(command, self.directory, RAY_FAKE_CLUSTER="1", AUTOSCALER_UPDATE_INTERVAL_S="1")
        except BaseException:
            self.close()
            raise

    def close(self):
        """End the head and all nodes."""
        end(processes_of(self.directory))
        self._reserved.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _config(self):
        """Return what the autoscaler requires, with Ray's provider of nodes on one machine."""
        node = {"CPU": 1, "object_store_memory": STORE_BYTES}
        return {
            "cluster_name": "autoscaled",
            "max_workers": 2,
            "upscaling_speed": 1.0,
            "idle_timeout_minutes": 5,
            "provider": {
                "type": "fake_multinode",
                "gcs_address": self.address,
                "use_node_id_as_ip": True,
                "disable_node_updaters": True,
                "disable_launch_config_check": True,
            },
            "auth": {"ssh_user": "none"},
            "docker": {},
            "file_mounts": {},
            "file_mounts_sync_continuously": False,
            "head_node_type": "ray.head.default",
            "available_node_types": {
                "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
                "node": {"resources": node, "node_config": {}, "min_workers": 0, "max_workers": 2},
            },
        } | {name: [] for name in EMPTY_LISTS}
