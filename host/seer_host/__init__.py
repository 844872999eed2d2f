"""What every real engine's process needs to work for Seer, whatever the engine."""
