"""The parts that drive a rollout: the fleet of instances, the controller, transcripts, sessions."""
