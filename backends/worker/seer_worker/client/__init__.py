"""The runtime's side of a worker: instances as clients of worker processes, and how these are started."""
