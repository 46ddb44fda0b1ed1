"""What the configuration of a model says: sizes, families, parallel plans, pretrained folders. Imports no torch."""
