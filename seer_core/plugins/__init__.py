"""Config, hooks and slots: how a run is put together from plug-ins."""
