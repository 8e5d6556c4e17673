"""What `lightning-pipe check` does: one training step in several ways, compared with one device."""
