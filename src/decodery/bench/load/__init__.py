"""What a server stands: requests that arrive by chance or as recorded, more and more of them until it breaks."""
