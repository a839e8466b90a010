"""What kept prompts change, measured, and kept beside a checkpoint."""
