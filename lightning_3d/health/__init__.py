"""What watches over a run between its checkpoints."""
