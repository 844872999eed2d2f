"""Sources of weights as a worker reads them, and memory that a sleeping instance gives back."""
