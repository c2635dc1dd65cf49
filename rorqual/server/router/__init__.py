"""One address in front of several servers that hold the same model."""
