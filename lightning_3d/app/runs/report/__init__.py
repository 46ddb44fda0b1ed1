"""Reports as single HTML files that load nothing from a network: `report.html` of a run,
`sweep.html` of a sweep. Imports no torch.

`run` and `sweep` read the folder and choose what the page shows, `page` writes the file, `assets`
has templates, styles and the scripts that draw.
"""
