"""The worker's side: its loop, and the parts that adapters of engines are made of."""
