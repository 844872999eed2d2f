"""Serve the environment by verifiers' own server; prints its address."""

from verifiers.v1.serve import serve_env
from verifiers.v1.utils.loaders import resolve_env_config


class Printed:
    def put(self, address):
        print(address, flush=True)


if __name__ == "__main__":
    config = resolve_env_config({"taskset": {"id": "guessing"}})
    serve_env(max_workers=1, address="tcp://127.0.0.1:0", address_queue=Printed(), config=config)
