"""What a plug-in or a backend implements: Protocols of policies, engines, KV pools, drafters and clocks."""
