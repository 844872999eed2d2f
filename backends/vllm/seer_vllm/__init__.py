"""vLLM engines for Seer: one process per instance, chunks in and out, keyed sampling inside."""
