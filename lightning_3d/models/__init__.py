"""Models by their configuration: sizes, families, parallel plans, pretrained folders."""
