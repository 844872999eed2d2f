"""The record of a rollout, its replay, and what it says of each request."""
