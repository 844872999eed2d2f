"""verl's training on Seer's rollouts: ``actor_rollout_ref.rollout.name=seer`` and the class of its manager.

Nothing is imported here: verl loads ``seer_verl.plugin`` while it is being imported itself.
"""
