"""What drives a rollout: the fleet of instances, the controller, transcripts, sessions."""
