"""The laboratory: policies side by side on simulated engines, on workloads or on recorded lengths."""
