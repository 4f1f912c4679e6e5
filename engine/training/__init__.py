"""The trainer: a manifest, its tensors and a base checkpoint in; a checkpoint and metrics out."""
