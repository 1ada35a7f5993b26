FILE = "modeling-overlay.cdx.json"
NAMESPACE = "modeling-overlay"
