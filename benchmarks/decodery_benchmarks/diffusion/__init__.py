"""Ways of filling canvases on ParallelBench's lists: what they get right, against how much a pass writes."""
