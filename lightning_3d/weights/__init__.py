"""The values of parameters: initialized from a seed, or read from pretrained files."""
