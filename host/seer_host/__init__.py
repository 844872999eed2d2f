"""The machine that Seer runs on: processes, files, ports, memory, installations."""
