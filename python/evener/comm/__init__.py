"""The collective layer: topology, buckets, collectives, forms.

Start reading at `reducer` (what the front doors use), then `topology`, `buckets`, `lanes`, `wires`.
"""
