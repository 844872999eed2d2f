"""Long checks on real engines: small by default, in full with --soak-minutes."""
