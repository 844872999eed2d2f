"""The worker: the process of a real engine, its wire, and its client in the runtime."""
